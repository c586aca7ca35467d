#ifndef SYCL_LANGUAGE_VERSION
#define SYCL_DISABLE_FSYCL_SYCLHPP_WARNING
#endif
#include "host.h"

#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <sycl/sycl.hpp>
#include <vector>

#include "aot.h"
#include "opencl_binary.h"

namespace syclex = sycl::ext::oneapi::experimental;

namespace {

using Executable = sycl::kernel_bundle<sycl::bundle_state::executable>;

thread_local std::string error;

/// Kernels by name; what they came from is kept as long as they are.
struct Program {
  std::vector<Executable> bundles;
  std::vector<std::unique_ptr<hal_xpu::OpenclProgram>> binaries;
  hal_xpu::Lookup ahead_of_time;
  sycl::queue queue;
  std::map<std::string, std::unique_ptr<sycl::kernel>> kernels;
  std::mutex lock;
  bool from_source = true;
};

template <typename R, typename F> R guarded(R failed, F &&body) {
  try {
    return body();
  } catch (const std::exception &found) {
    error = found.what();
  } catch (...) {
    error = "an exception of unknown type";
  }
  return failed;
}

sycl::queue &queue_of(void *queue) {
  if (!queue) throw std::invalid_argument("the queue is null");
  return *static_cast<sycl::queue *>(queue);
}

std::string quoted(const std::string &text) {
  std::string out(1, '"');
  for (char c : text) {
    if (static_cast<unsigned char>(c) < 0x20) continue;
    if (c == '"' || c == '\\') out.push_back('\\');
    out.push_back(c);
  }
  out.push_back('"');
  return out;
}

const char *element(syclex::matrix::matrix_type type) {
  using syclex::matrix::matrix_type;
  switch (type) {
  case matrix_type::sint8: return "s8";
  case matrix_type::uint8: return "u8";
  case matrix_type::bf16: return "bf16";
  case matrix_type::fp16: return "fp16";
  case matrix_type::fp32: return "fp32";
  case matrix_type::sint32: return "s32";
  default: return "other";
  }
}

std::string matrices(const sycl::device &device) {
  std::string out = "[";
  if (!device.has(sycl::aspect::ext_intel_matrix)) return "[]";
  for (const auto &found : device.get_info<syclex::info::device::matrix_combinations>()) {
    if (out.size() > 1) out += ",";
    out += std::string("{\"a\":\"") + element(found.atype) + "\",\"b\":\"" + element(found.btype) + "\",\"c\":\"" + element(found.ctype) + "\"";
    const std::pair<const char *, size_t> sizes[] = {{"max_m", found.max_msize}, {"max_n", found.max_nsize}, {"max_k", found.max_ksize},
                                                     {"m", found.msize},         {"n", found.nsize},         {"k", found.ksize}};
    for (const auto &[name, size] : sizes) out += std::string(",\"") + name + "\":" + std::to_string(size);
    out += "}";
  }
  return out + "]";
}

std::string described(sycl::device device) {
  namespace info = sycl::info::device;
  std::string sizes;
  for (size_t size : device.get_info<info::sub_group_sizes>()) sizes += (sizes.empty() ? "" : ",") + std::to_string(size);
  const auto platform = device.get_platform().get_info<sycl::info::platform::name>();
  return "{\"name\":" + quoted(device.get_info<info::name>()) + ",\"platform\":" + quoted(platform) +
         ",\"driver\":" + quoted(device.get_info<info::driver_version>()) + ",\"cpu\":" + (device.is_cpu() ? "true" : "false") +
         ",\"backend\":" + quoted(device.get_backend() == sycl::backend::opencl ? "opencl" : "other") +
         ",\"units\":" + std::to_string(device.get_info<info::max_compute_units>()) +
         ",\"local_memory\":" + std::to_string(device.get_info<info::local_mem_size>()) + ",\"sub_groups\":[" + sizes + "]" +
         ",\"can_compile\":" + (device.ext_oneapi_can_build(syclex::source_language::sycl) ? "true" : "false") +
         ",\"matrices\":" + matrices(device) + "}";
}

void *program_of(sycl::queue &queue, Executable bundle) { return new Program{{std::move(bundle)}, {}, nullptr, queue, {}, {}, true}; }

std::unique_ptr<sycl::kernel> found_kernel(Program &program, const std::string &name) {
  // kernels of an image have the compiler's names, those of a source the names in it
  const std::string spelled = "__sycl_kernel_" + name;
  if (program.ahead_of_time)
    if (auto found = program.ahead_of_time(program.queue, name)) return found;
  for (const auto &binary : program.binaries)
    if (auto found = binary->kernel(spelled, program.queue)) return found;
  for (auto &bundle : program.bundles)
    for (const auto &each : {name, spelled})
      if (bundle.ext_oneapi_has_kernel(each)) return std::make_unique<sycl::kernel>(bundle.ext_oneapi_get_kernel(each));
  throw std::runtime_error("no kernel " + name + " in the program: this device's compiler dropped it, or it is not in the source");
}

/// SPIR-V of all images; empty where the runtime gives one in another form.
std::vector<std::vector<std::byte>> spirv_of(const Executable &bundle) {
  std::vector<std::vector<std::byte>> all;
  const uint32_t magic = 0x07230203;
  for (const auto &image : bundle) {
    all.push_back(image.ext_oneapi_get_backend_content());
    if (all.back().size() < sizeof magic || std::memcmp(all.back().data(), &magic, sizeof magic) != 0) return {};
  }
  return all;
}

Executable from_spirv(sycl::queue &queue, const std::byte *first, size_t size) {
  const std::vector<std::byte> words(first, first + size);
  auto text = syclex::create_kernel_bundle_from_source(queue.get_context(), syclex::source_language::spirv, words);
  return syclex::build(text);
}

void set_argument(sycl::handler &handler, int at, const hal_xpu_arg &arg) {
  switch (arg.kind) {
  case 'p': handler.set_arg(at, arg.pointer); return;
  case 'i': handler.set_arg(at, arg.i); return;
  case 'l': handler.set_arg(at, arg.l); return;
  case 'f': handler.set_arg(at, arg.f); return;
  default: throw std::invalid_argument(std::string("argument ") + std::to_string(at) + " is of unknown kind " + arg.kind);
  }
}

} // namespace

const char *hal_xpu_error() { return error.c_str(); }

int hal_xpu_ahead_of_time() {
#ifdef HAL_XPU_AOT
  return 1;
#else
  return 0;
#endif
}

void *hal_xpu_cpu_queue() {
  static std::mutex lock;
  static std::unique_ptr<sycl::queue> queue;
  return guarded<void *>(nullptr, [&]() -> void * {
    std::lock_guard<std::mutex> hold(lock);
    if (!queue) queue = std::make_unique<sycl::queue>(sycl::cpu_selector_v, sycl::property::queue::in_order());
    return queue.get();
  });
}

int64_t hal_xpu_describe(void *queue, char *out, int64_t size) {
  return guarded<int64_t>(-1, [&]() -> int64_t {
    const std::string text = described(queue_of(queue).get_device());
    const auto needed = static_cast<int64_t>(text.size()) + 1;
    if (out && size >= needed) std::memcpy(out, text.c_str(), needed);
    return needed;
  });
}

void *hal_xpu_compile(void *queue, const char *source, const char *const *options, int32_t count) {
  std::string log;
  void *made = guarded<void *>(nullptr, [&]() -> void * {
    auto &q = queue_of(queue);
    const std::vector<std::string> words(options, options + count);
#ifdef HAL_XPU_AOT
    if (auto lookup = hal_xpu::ahead_of_time(source, words)) return new Program{{}, {}, lookup, q, {}, {}, false};
#endif
    auto text = syclex::create_kernel_bundle_from_source(q.get_context(), syclex::source_language::sycl, std::string(source));
    return program_of(q, syclex::build(text, syclex::properties{syclex::build_options{words}, syclex::save_log{&log}}));
  });
  if (!made && !log.empty()) error += "\n" + log;
  return made;
}

void *hal_xpu_load(void *queue, int32_t binary, const void *data, const int64_t *sizes, int32_t count) {
  return guarded<void *>(nullptr, [&]() -> void * {
    auto &q = queue_of(queue);
    auto program = std::unique_ptr<Program>(new Program{{}, {}, nullptr, q, {}, {}, false});
    const auto *at = static_cast<const std::byte *>(data);
    for (int32_t i = 0; i < count; at += sizes[i++]) {
      if (binary) program->binaries.push_back(hal_xpu::OpenclProgram::load(q, at, static_cast<size_t>(sizes[i])));
      else program->bundles.push_back(from_spirv(q, at, static_cast<size_t>(sizes[i])));
    }
    return program.release();
  });
}

int64_t hal_xpu_image(void *program, int32_t binary, int32_t index, void *out, int64_t size) {
  return guarded<int64_t>(-1, [&]() -> int64_t {
    auto &p = *static_cast<Program *>(program);
    std::vector<std::vector<std::byte>> all;
    // a bundle made from SPIR-V does not give it back
    for (const auto &bundle : p.bundles)
      for (auto &image : binary            ? hal_xpu::opencl_binaries(bundle, p.queue)
                         : p.from_source ? spirv_of(bundle)
                                         : std::vector<std::vector<std::byte>>{}) all.push_back(std::move(image));
    if (index < 0 || static_cast<size_t>(index) >= all.size()) return 0;
    const auto &bytes = all[index];
    const auto needed = static_cast<int64_t>(bytes.size());
    if (out && size >= needed) std::memcpy(out, bytes.data(), bytes.size());
    return needed;
  });
}

void *hal_xpu_kernel(void *program, const char *name) {
  return guarded<void *>(nullptr, [&]() -> void * {
    auto &p = *static_cast<Program *>(program);
    std::lock_guard<std::mutex> hold(p.lock);
    auto &kept = p.kernels[name];
    if (!kept) kept = found_kernel(p, name);
    return kept.get();
  });
}

void hal_xpu_release(void *program) { delete static_cast<Program *>(program); }

int hal_xpu_launch(void *queue, void *kernel, const hal_xpu_arg *args, int32_t count, const int64_t *groups, const int64_t *local) {
  return guarded(1, [&] {
    auto &q = queue_of(queue);
    const auto &k = *static_cast<sycl::kernel *>(kernel);
    const sycl::range<3> items(local[0], local[1], local[2]);
    const sycl::range<3> all(groups[0] * local[0], groups[1] * local[1], groups[2] * local[2]);
    q.submit([&](sycl::handler &handler) {
      for (int at = 0; at < count; ++at) set_argument(handler, at, args[at]);
      handler.parallel_for(sycl::nd_range<3>(all, items), k);
    });
    return 0;
  });
}

int hal_xpu_wait(void *queue) {
  return guarded(1, [&] {
    queue_of(queue).wait_and_throw();
    return 0;
  });
}
