// What surrounds the matrices of a decoder layer, for AVX2. Like the other units built for one
// instruction set, it includes nothing that could emit an inline function with external linkage.
#include <immintrin.h>

#include "layer_kernels.h"

namespace hal_cpu {
namespace {
#include "simd_avx2.h"
#include "tile_block.inc.h"
#include "epilogue.inc.h"
#include "kv_simd_avx2.h"
#include "layer_rows.inc.h"
#include "layer_attend.inc.h"
}  // namespace

extern const LayerKernels kLayerAvx2 = {norm_row, add_row, gate_row, rotate_row, attend, attend_floats, finish};

}  // namespace hal_cpu
