// The unit for matrix tiles, built twice: for the processor's own and for emulated ones, under the
// name HAL_AMX_BLOCKS.
#include <immintrin.h>

#include "blocks.h"

namespace hal_cpu {
namespace {
#include "simd_avx512.h"
#include "tile_block.inc.h"
#include "dot_block.inc.h"
#include "epilogue.inc.h"
#include "encode.inc.h"
// Measured: on Intel's cores with AMX four streams are faster than one.
constexpr int kStreams = 4;
#include "vnni_block.inc.h"
#include "amx.h"
#include "amx_expand.inc.h"
#include "amx_sums.inc.h"
#include "amx_block.inc.h"

void totals(const Matrix& m, const Records& f, int64_t tile, int64_t tiles, const BlockRows& rows,
            float* out, int64_t step) {
  amx_totals(m, f, tile, tiles, rows, out, step);
}
void encode(const float* x, int64_t k, const Records& f, char* record) {
  if (f.operand == kBf16) encode_bf16(x, k, f, record);
  else encode_int8(x, k, f, record);
}
#include "block_epilogue.inc.h"
}  // namespace

extern const BlockKernels HAL_AMX_BLOCKS = {load_row,     encode,        amx_leave,
                                            block_linear, block_gate_up, block_add, combine};

}  // namespace hal_cpu
