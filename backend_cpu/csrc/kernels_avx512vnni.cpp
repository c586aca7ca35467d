// The kernels for int8 activations on AVX512 with the byte dot product. Like the other units,
// nothing here may emit an inline function with external linkage.
#include <immintrin.h>

#include "blocks.h"

namespace hal_cpu {
namespace {
#include "simd_avx512.h"
#include "tile_block.inc.h"
#include "epilogue.inc.h"
#include "encode.inc.h"
// Measured: on AMD's cores one stream is a sixth faster than four.
constexpr int kStreams = 1;
#include "vnni_block.inc.h"

void totals(const Matrix& m, const Records& f, int64_t tile, int64_t tiles, const BlockRows& rows,
            float* out, int64_t step) {
  vnni_totals(m, f, tile, tiles, rows, out, step);
}
void nothing() {}
#include "block_epilogue.inc.h"
}  // namespace

extern const BlockKernels kBlocksAvx512Vnni = {load_row,     encode_int8,   nothing,
                                               block_linear, block_gate_up, block_add, combine};

}  // namespace hal_cpu
