// The four-bit ops ahead of time, with joint_matrix and the tiles of Ponte Vecchio and Battlemage. Other tiles are compiled at run time.
#ifndef SYCL_LANGUAGE_VERSION
#define SYCL_DISABLE_FSYCL_SYCLHPP_WARNING
#endif
#define HAL_ENGINE 2
#define HAL_SG 16
#define HAL_TM 8
#define HAL_KB 32
#include "aot.h"
#include "kernels/grouped_int4.hpp"
#include "kernels/grouped_int8.hpp"
#include "kernels/rows.hpp"
#include "kernels/rows_int4.hpp"

#include <algorithm>

namespace hal_xpu {
namespace {

namespace syclex = sycl::ext::oneapi::experimental;

template <auto *Kernel> std::unique_ptr<sycl::kernel> made(const sycl::queue &queue) {
  const std::vector<sycl::device> devices{queue.get_device()};
  const std::vector<sycl::kernel_id> ids{syclex::get_kernel_id<Kernel>()};
  auto bundle = sycl::get_kernel_bundle<sycl::bundle_state::executable>(queue.get_context(), devices, ids);
  return std::make_unique<sycl::kernel>(bundle.template ext_oneapi_get_kernel<Kernel>());
}

struct Row {
  const char *name;
  std::unique_ptr<sycl::kernel> (*make)(const sycl::queue &);
};
#define HAL_ROW_OF(NAME) {#NAME, &made<&NAME>}
#define HAL_RUNGS(NAME) HAL_ROW_OF(NAME##_0), HAL_ROW_OF(NAME##_1), HAL_ROW_OF(NAME##_2), HAL_ROW_OF(NAME##_3)

const Row KERNELS[] = {
    HAL_RUNGS(grouped_int4), HAL_RUNGS(gated_int4),    HAL_RUNGS(grouped_int8), HAL_RUNGS(gated_int8),    HAL_ROW_OF(rows_int4),
    HAL_ROW_OF(sort_slots),  HAL_ROW_OF(slot_experts), HAL_ROW_OF(gather_rows), HAL_ROW_OF(quantize_rows), HAL_ROW_OF(sum_slots),
};

std::unique_ptr<sycl::kernel> found(const sycl::queue &queue, const std::string &name) {
  for (const auto &row : KERNELS)
    if (name == row.name) return row.make(queue);
  return nullptr;
}

} // namespace

Lookup ahead_of_time(const std::string &source, const std::vector<std::string> &options) {
  static const char *const SOURCES[] = {"grouped_int4.hpp", "grouped_int8.hpp", "rows.hpp", "rows_int4.hpp"};
  const bool known = std::any_of(std::begin(SOURCES), std::end(SOURCES),
                                 [&](const char *name) { return source == std::string("#include \"") + name + "\"\n"; });
  // rows have no products, so any engine of that width is theirs
  const bool products = source.find("grouped") != std::string::npos;
  for (const auto &option : options) {
    const bool folder = option.rfind("-I", 0) == 0, width = option == "-DHAL_SG=16";
    const bool tile = option == "-DHAL_ENGINE=2" || option == "-DHAL_TM=8" || option == "-DHAL_KB=32";
    if (!folder && !width && !tile && (products || option.rfind("-DHAL_ENGINE=", 0) != 0)) return nullptr;
  }
  return known ? &found : nullptr;
}

} // namespace hal_xpu
