// Kernels that take their activations as records: operands in the width that the instruction
// multiplies, then a scale and a sum for each block of k. Like kernels.h this crosses into units
// built for one instruction set, so nothing here may define an inline function or a template.
#pragma once
#include "kernels.h"

namespace hal_cpu {

// What becomes of activations: int8 codes with one scale per row, or per span of k; or bf16.
enum Operand { kInt8Token = 0, kInt8Group = 1, kInt8Rescaled = 2, kBf16 = 3 };

// Longest run of k that one sum of products covers: far from overflow of bytes, and short enough
// that 16 rows of it fit in four matrix tiles. Of bf16 it is half.
constexpr int64_t kIntegerRun = 256;
// Bytes that the operands of a record are a multiple of: one row of a matrix tile.
constexpr int64_t kRecordStep = 64;

// The record of a row for one matrix: `padded` operands, then float[blocks] scales, then the sums
// of each block, int32 times `factor` for int8 and float for bf16.
struct Records {
  Operand operand;
  int64_t padded;  // operands, zero past k
  int64_t group;   // k of one weight scale; blocks start anew with each
  int64_t span;    // k of one activation scale, 0 for the whole row
  int64_t block;   // k of one sum of products; a span holds whole ones but for its last
  int64_t blocks;
  int64_t scales_at, sums_at, stride;  // bytes
  int32_t factor;  // of bf16, whether the codes have 4 bits
};

// Rows [0, count) at records + i * stride.
struct BlockRows {
  const char* records;
  int64_t count;
};

// Rows that one call of a kernel takes, and the floats of its work space.
constexpr int64_t kBand = 128;
constexpr int64_t kBandFloats = kBand * kTilesPerCall * kTile;
// Rows behind the last record that may be read, though nothing comes of them: a matrix tile has 16.
constexpr int64_t kSlackRows = 15;

struct BlockKernels {
  bool (*load_row)(const void* src, FloatKind kind, const int32_t* perm, float scale, float* dst,
                   int64_t k, int64_t padded);
  // A row of k floats, padded by load_row, into its record. A value that is not finite makes
  // every result of its row (or of its spans) NaN and reaches no other.
  void (*encode)(const float* x, int64_t k, const Records& r, char* record);
  // Lets go of what the processor keeps for the calls of a task, such as the shape of matrix tiles.
  void (*leave)();
  // out[r][col] = row r . w[col] + bias for `tiles` (<= kTilesPerCall) tiles, rows out_step bytes
  // apart. `work` has kBandFloats.
  void (*linear)(const Matrix& w, const Records& form, int64_t tile, int64_t tiles,
                 const BlockRows& rows, float* work, char* out, int64_t out_step,
                 FloatKind out_kind);
  // h[r][col] = act(gate, up), zero from n to the end of the tile; gate may be null. `work` has
  // 2 * kBandFloats.
  void (*gate_up)(const Matrix* gate, const Records& gate_form, const Matrix& up,
                  const Records& up_form, int64_t tile, int64_t tiles, const BlockRows& gate_rows,
                  const BlockRows& up_rows, const Activation& act, float* work, float* h,
                  int64_t h_step);
  // sums[to[r]][0 .. tiles * kTile) += weights[r] * (row r . w[col] + bias), sums_step floats
  // apart.
  void (*add)(const Matrix& w, const Records& form, int64_t tile, int64_t tiles,
              const BlockRows& rows, const int32_t* to, const float* weights, float* work,
              float* sums, int64_t sums_step);
  void (*combine)(const float* const* rows, const float* weights, int64_t count, float scaling,
                  void* out, FloatKind out_kind, int64_t begin, int64_t end);
};

extern const BlockKernels kBlocksAvx512Vnni;
extern const BlockKernels kBlocksAmx;
extern const BlockKernels kBlocksAmxEmulated;

}  // namespace hal_cpu
