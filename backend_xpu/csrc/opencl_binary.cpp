#ifndef SYCL_LANGUAGE_VERSION
#define SYCL_DISABLE_FSYCL_SYCLHPP_WARNING
#endif
#define CL_TARGET_OPENCL_VERSION 300
#include "opencl_binary.h"

#include <CL/cl.h>
#include <dlfcn.h>
#include <stdexcept>
#include <sycl/backend/opencl.hpp>

namespace hal_xpu {
namespace {

constexpr auto OPENCL = sycl::backend::opencl;

/// A function of the loader that the SYCL runtime itself uses: nothing is linked, so that machines without OpenCL load this library.
template <typename F> F *entry(const char *name) {
  static void *library = dlopen("libOpenCL.so.1", RTLD_NOW | RTLD_LOCAL);
  void *found = library ? dlsym(library, name) : nullptr;
  if (!found) throw std::runtime_error(std::string("libOpenCL.so.1 has no ") + name);
  return reinterpret_cast<F *>(found);
}
#define HAL_CL(name) entry<decltype(name)>(#name)

void expect(cl_int result, const char *what) {
  if (result != CL_SUCCESS) throw std::runtime_error(std::string(what) + " gave OpenCL error " + std::to_string(result));
}

} // namespace

std::vector<std::vector<std::byte>> opencl_binaries(const sycl::kernel_bundle<sycl::bundle_state::executable> &bundle, const sycl::queue &queue) {
  std::vector<std::vector<std::byte>> all;
  if (queue.get_backend() != OPENCL) return all;
  for (cl_program program : sycl::get_native<OPENCL>(bundle)) {
    size_t size = 0;
    expect(HAL_CL(clGetProgramInfo)(program, CL_PROGRAM_BINARY_SIZES, sizeof size, &size, nullptr), "clGetProgramInfo");
    auto &binary = all.emplace_back(size);
    auto *at = reinterpret_cast<unsigned char *>(binary.data());
    if (size) expect(HAL_CL(clGetProgramInfo)(program, CL_PROGRAM_BINARIES, sizeof at, &at, nullptr), "clGetProgramInfo");
  }
  return all;
}

std::unique_ptr<OpenclProgram> OpenclProgram::load(sycl::queue &queue, const void *data, size_t size) {
  if (queue.get_backend() != OPENCL) throw std::runtime_error("device binaries are loaded on OpenCL devices alone");
  const auto context = sycl::get_native<OPENCL>(queue.get_context());
  const auto device = sycl::get_native<OPENCL>(queue.get_device());
  const auto *bytes = static_cast<const unsigned char *>(data);
  cl_int status = CL_SUCCESS, result = CL_SUCCESS;
  cl_program made = HAL_CL(clCreateProgramWithBinary)(context, 1, &device, &size, &bytes, &status, &result);
  expect(result, "clCreateProgramWithBinary");
  std::unique_ptr<OpenclProgram> program(new OpenclProgram(made));
  expect(status, "clCreateProgramWithBinary");
  expect(HAL_CL(clBuildProgram)(made, 1, &device, "", nullptr, nullptr), "clBuildProgram");
  return program;
}

OpenclProgram::~OpenclProgram() { HAL_CL(clReleaseProgram)(static_cast<cl_program>(program_)); }

std::unique_ptr<sycl::kernel> OpenclProgram::kernel(const std::string &name, const sycl::queue &queue) const {
  cl_int result = CL_SUCCESS;
  cl_kernel made = HAL_CL(clCreateKernel)(static_cast<cl_program>(program_), name.c_str(), &result);
  if (result == CL_INVALID_KERNEL_NAME) return nullptr;
  expect(result, "clCreateKernel");
  return std::make_unique<sycl::kernel>(sycl::make_kernel<OPENCL>(made, queue.get_context()));
}

} // namespace hal_xpu
