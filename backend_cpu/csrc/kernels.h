// What crosses from the common code into the units built for one instruction set: plain data and
// function pointers only. Nothing here may define an inline function or a template: the linker
// keeps one copy of those, and could keep the copy that was built with AVX512.
#pragma once
#include <stdint.h>

namespace hal_cpu {

enum FloatKind { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };
enum ZeroKind { kZeroNone = 0, kZeroInteger = 1, kZeroMinimum = 2 };
enum ActivationKind { kSilu = 0, kGelu = 1, kGeluTanh = 2, kSwigluOai = 3, kRelu2 = 4 };

// Columns of a tile, and the longest run of k that one partial sum covers (longer groups are
// cut, so that a whole-channel scale does not mean one long fp32 chain).
constexpr int64_t kTile = 16;
constexpr int64_t kBlock = 256;
// Most tiles one kernel call handles; bounds its stack buffers.
constexpr int64_t kTilesPerCall = 4;

// One packed weight matrix [n, k] (of one expert). `codes` is [tiles, words, 16]; scales, zeros
// and mins are [tiles, groups, 16].
struct Matrix {
  const int32_t* codes;
  const void* scales;
  const uint8_t* zeros;
  const void* mins;
  const void* bias;  // [n] or null
  int64_t n, k, words, groups, group;
  int bits;
  ZeroKind zero;
  FloatKind scale_kind, min_kind, bias_kind;
};

// value(gate) * up, with the sigmoid of silu and swiglu_oai taken at alpha * gate.
struct Activation {
  ActivationKind kind;
  bool has_limit;
  float alpha, limit;
};

// Rows of activations: fp32, zero-padded to a whole tile, then what Kernels::split_row adds; with
// their block sums where Kernels::needs_sums asks for them.
struct Rows {
  const float* const* x;
  const float* const* sums;
  int64_t count;
  int planes;
};

struct Kernels {
  // bf16 planes that the kernels want beside a row of this kind, 0 if they take fp32 only.
  int (*planes)(FloatKind kind);
  // Fills the planes of a row in place, 2 * planes bytes per value behind the fp32 ones.
  void (*split_row)(float* row, int64_t k, int planes);
  bool (*needs_sums)(const Matrix& w);
  // dst[0..padded) = float(src[perm[i]]) * scale, zeros past k. False if perm leaves [0, k).
  bool (*load_row)(const void* src, FloatKind kind, const int32_t* perm, float scale, float* dst,
                   int64_t k, int64_t padded);
  // One sum per block of at most kBlock within each group.
  void (*block_sums)(const float* x, int64_t k, int64_t group, float* sums);
  // out[r][col] = x[r] . w[col] + bias for the columns of `tiles` (<= kTilesPerCall) tiles.
  void (*linear)(const Matrix& w, int64_t tile, int64_t tiles, const Rows& rows, void* const* out,
                 FloatKind out_kind);
  // h[r][col] = act(gate, up); gate may be null. Pads h with zeros to a whole tile.
  void (*gate_up)(const Matrix* gate, const Matrix& up, int64_t tile, int64_t tiles,
                  const Rows& gate_rows, const Rows& up_rows, const Activation& act,
                  float* const* h);
  // out[i] = scaling * sum over j of weights[j] * rows[j][i], in order of j, rounded once.
  void (*combine)(const float* const* rows, const float* weights, int64_t count, float scaling,
                  void* out, FloatKind out_kind, int64_t begin, int64_t end);
};

extern const Kernels kKernelsAvx2;
extern const Kernels kKernelsAvx512;
extern const Kernels kKernelsAvx512Bf16;

}  // namespace hal_cpu
