// The ops that run the probes on torch's threads, and which of them this machine may run.
#include "probe.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <atomic>
#include <string>
#include <vector>

#include "args.h"
#include "checks.h"
#include "isa.h"

namespace hal_cpu {
namespace {

constexpr struct {
  Isa least;
  const PeakProbe* probe;
} kProbes[] = {{Isa::kAvx2, &kProbeAvx2Fma},
               {Isa::kAvx512, &kProbeAvx512Fma},
               {Isa::kAvx512Vnni, &kProbeAvx512Vnni},
               {Isa::kAvx512Bf16, &kProbeAvx512Bf16},
               {Isa::kAmx, &kProbeAmxBf16},
               {Isa::kAmx, &kProbeAmxInt8}};

// HAL_CPU_ISA lowers the probes as it lowers the kernels: a limit is that of what may be used.
std::vector<const PeakProbe*> usable_probes() {
  std::vector<const PeakProbe*> found;
  for (const auto& row : kProbes)
    if (usable_isa() >= row.least) found.push_back(row.probe);
  return found;
}

// Bit patterns that are small numbers as bf16 and as int8, so that no unit finds zeros to skip.
void fill(char* scratch) {
  for (size_t i = 0; i < kProbeScratch; i += 2) {
    scratch[i] = static_cast<char>(i / 2 % 5);
    scratch[i + 1] = 0x3c;
  }
}

double run_peak(const std::string& name, int64_t steps) {
  check_range(steps, "steps", 1, int64_t{1} << 40);
  for (const PeakProbe* probe : usable_probes()) {
    if (name != probe->name) continue;
    const int64_t threads = torch::stable::get_num_threads();
    std::atomic<int64_t> rounds{0};
    torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
      alignas(64) char scratch[kProbeScratch];
      fill(scratch);
      for (int64_t i = begin; i < end; ++i) probe->run(steps, scratch);
      rounds += end - begin;
    });
    return static_cast<double>(rounds) * static_cast<double>(steps) * static_cast<double>(probe->ops_per_step);
  }
  fail("no probe '", name, "' on this machine; probe_peaks() lists them");
}

int64_t run_read(const Tensor& buffer, int64_t start, int64_t bytes, int64_t streams) {
  check_plain(buffer, "buffer");
  check_type(buffer, "buffer", ScalarType::Byte);
  check_range(streams, "streams", 1, 64);
  const int64_t threads = torch::stable::get_num_threads(), size = buffer.numel();
  const auto line = static_cast<int64_t>(kProbeLine);
  if (start < 0 || bytes < 1 || start > size || bytes > size - start)
    fail("reading ", bytes, " bytes from ", start, " of a buffer of ", size);
  const int64_t part = bytes / (threads * streams * line) * streams * line;
  if (part == 0) fail("bytes is ", bytes, "; expected at least ", threads * streams * line, " for ", threads, " threads");
  const char* data = static_cast<const char*>(buffer.data_ptr()) + start;
  const Isa isa = usable_isa();
  if (isa < Isa::kAvx2) fail("this CPU or operating system does not offer AVX2");
  const auto read = isa >= Isa::kAvx512 ? probe_read_avx512 : probe_read_avx2;
  std::atomic<uint64_t> sum{0};
  torch::stable::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      sum ^= read(data + i * part, static_cast<size_t>(part), streams);
  });
  return static_cast<int64_t>(sum.load() & 0x7fffffffffffffffu);
}

void probe_peaks_op(StableIValue* stack, uint64_t, uint64_t) {
  std::string text;
  for (const PeakProbe* probe : usable_probes()) text += std::string(text.empty() ? "" : ",") + probe->kind + ":" + probe->name;
  stack[0] = torch::stable::detail::from(text);
}

void probe_peak_op(StableIValue* stack, uint64_t inputs, uint64_t) {
  Args args(stack, inputs);
  const std::string name = args.text();
  const int64_t steps = args.integer();
  stack[0] = torch::stable::detail::from(run_peak(name, steps));
}

void probe_read_op(StableIValue* stack, uint64_t inputs, uint64_t) {
  Args args(stack, inputs);
  const Tensor buffer = args.tensor();
  const int64_t start = args.integer(), bytes = args.integer(), streams = args.integer();
  stack[0] = torch::stable::detail::from(run_read(buffer, start, bytes, streams));
}

}  // namespace
}  // namespace hal_cpu

// Beside the library of ops.cpp, so that measuring and computing stay apart.
STABLE_TORCH_LIBRARY_FRAGMENT(hal_cpu, m) {
  m.def("probe_peaks() -> str");
  m.def("probe_peak(str name, int steps) -> float");
  m.def("probe_read(Tensor buffer, int start, int bytes, int streams) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(hal_cpu, CompositeExplicitAutograd, m) {
  m.impl("probe_peaks", &hal_cpu::probe_peaks_op);
  m.impl("probe_peak", &hal_cpu::probe_peak_op);
}

STABLE_TORCH_LIBRARY_IMPL(hal_cpu, CPU, m) {
  m.impl("probe_read", &hal_cpu::probe_read_op);
}
