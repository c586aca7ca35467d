// Kernels that oneAPI's compiler made ahead of time; only where it builds this library.
#pragma once
#include <memory>
#include <string>
#include <sycl/sycl.hpp>
#include <vector>

namespace hal_xpu {

/// A kernel by name; null where there is none of that name.
using Lookup = std::unique_ptr<sycl::kernel> (*)(const sycl::queue &queue, const std::string &name);

/// The kernels of a source with these options; null where they were not made ahead of time.
Lookup ahead_of_time(const std::string &source, const std::vector<std::string> &options);

} // namespace hal_xpu
