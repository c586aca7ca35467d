// Device binaries of programs on OpenCL devices: taken from a built bundle, and loaded again without a compiler.
#pragma once
#include <cstddef>
#include <memory>
#include <string>
#include <sycl/sycl.hpp>
#include <vector>

namespace hal_xpu {

/// The binaries of a bundle's programs; none on devices of other backends.
std::vector<std::vector<std::byte>> opencl_binaries(const sycl::kernel_bundle<sycl::bundle_state::executable> &bundle, const sycl::queue &queue);

class OpenclProgram {
public:
  /// Throws where the runtime does not take the binary: it is damaged, or of another device or driver.
  static std::unique_ptr<OpenclProgram> load(sycl::queue &queue, const void *data, size_t size);
  ~OpenclProgram();
  /// Null where the program has no kernel of that name.
  std::unique_ptr<sycl::kernel> kernel(const std::string &name, const sycl::queue &queue) const;

private:
  explicit OpenclProgram(void *program) : program_(program) {}
  OpenclProgram(const OpenclProgram &) = delete;
  void *program_;
};

} // namespace hal_xpu
