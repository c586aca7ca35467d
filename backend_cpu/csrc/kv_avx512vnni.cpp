// Attention over packed pages for AVX512 with VNNI. Like the other units built for one instruction set, it
// includes nothing that could emit an inline function with external linkage.
#include <immintrin.h>

#include "kv.h"

#define HAL_VNNI

namespace hal_cpu {
namespace {
#include "simd_avx512.h"
#include "kv_exp.inc.h"
#include "kv_simd_avx512.h"
#include "kv_run.inc.h"
#include "kv_products.inc.h"
#include "kv_scores.inc.h"
#include "kv_split.inc.h"
#include "kv_rows.inc.h"
#include "kv_quantize.inc.h"
}  // namespace

extern const KvKernels kKvAvx512Vnni = {split,    work_bytes, round_query,    merge,     rotate,           load_floats,
                             store_floats, halves, quantize, quantize_group, direction, quantize_rotated};

}  // namespace hal_cpu
