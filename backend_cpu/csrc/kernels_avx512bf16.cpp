// The kernels for AVX512 with the bf16 dot product, used for 4-bit codes; 8-bit codes run as on
// AVX512. Like the other units, nothing here may emit an inline function with external linkage.
#include <immintrin.h>

#include "kernels.h"

#define HAL_BF16_DOT

namespace hal_cpu {
namespace {
#include "simd_avx512.h"
#include "tile_block.inc.h"
#include "dot_block.inc.h"
#include "epilogue.inc.h"
#include "walk.inc.h"

int bf16_planes(FloatKind kind) { return kind == kBFloat16 ? 1 : kind == kFloat16 ? 2 : 3; }
bool needs_sums(const Matrix& w) { return w.mins || (w.zeros && w.bits == 4); }
}  // namespace

extern const Kernels kKernelsAvx512Bf16 = {bf16_planes, split_row, needs_sums, load_row,
                                           block_sums,  linear,    gate_up,    combine};

}  // namespace hal_cpu
