// The kernels for AVX512. This unit alone is built with its instruction set, so it includes nothing
// that could emit an inline function with external linkage.
#include <immintrin.h>

#include "kernels.h"

namespace hal_cpu {
namespace {
#include "simd_avx512.h"
#include "tile_block.inc.h"
#include "epilogue.inc.h"
#include "walk.inc.h"

int no_planes(FloatKind) { return 0; }
void no_split(float*, int64_t, int) {}
bool needs_sums(const Matrix& w) { return w.mins != nullptr; }
}  // namespace

extern const Kernels kKernelsAvx512 = {no_planes, no_split, needs_sums, load_row,
                                     block_sums, linear, gate_up, combine};

}  // namespace hal_cpu
