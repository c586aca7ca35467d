// What crosses into the KV units built for one instruction set: plain data and function pointers
// only, as in kernels.h.
//
// Page layout `cpu.kv16`. A page holds `page_size` tokens, a multiple of 16, of all kv heads, one
// after the other, each in four parts without padding: codes of K, codes of V, scales of K, scales
// of V. A head's parts lie together since a task reads one head of many pages. A tile is 16 tokens.
//
// Codes are "word lines" of 16 32-bit lanes. Of K a lane is a token and the depth is the channels;
// of V a lane is a channel (of a group of 16) and the depth is the tile's tokens. A word of 32/b
// codes of b bits covers as many depths in pairs: field i of its low half is depth 2i, field i of its
// high half is depth 2i+1, so that one shift gives the operands of a multiply-add of pairs.
// 3 bits are a plane of 2-bit words, then a plane of 1-bit words that hold 32 depths: of V two
// groups of 16 channels share one, the second in fields 8 to 15. Where 16 channels are left, their
// fields 0 to 7 are sixteen words of 16 bits, half a line. fp32 is one code a word.
//
// Scales: fp16. Per token [16] scales, with minima [16] scales then [16] minima, one set a tile.
// Per channel [D] scales, with minima [D] then [D], one set for each two tiles.
#pragma once
#include <stdint.h>

#include "kernels.h"

namespace hal_cpu {

enum KvKind {
  kKvInt8 = 0,
  kKvInt4 = 1,
  kKvTable2 = 2,
  kKvTable3 = 3,
  kKvTable4 = 4,
  kKvInt16 = 5,  // only as decoded codes
  kKvBf16 = 6,
  kKvFp16 = 7,
  kKvFp8 = 8,
  kKvFp32 = 9,
};
constexpr int kKvFirstFloat = kKvBf16;

enum KvScales {
  kKvPlain = 0,          // none
  kKvToken = 1,          // x = code * scale[token]
  kKvTokenMin = 2,       // x = code * scale[token] + min[token]
  kKvChannel = 3,        // x = code * scale[channel]
  kKvChannelMin = 4,     // x = code * scale[channel] + min[channel]
};

constexpr int64_t kKvTile = 16;    // tokens of a tile
constexpr int64_t kKvGroup = 32;   // tokens that share scales per channel
constexpr int64_t kKvBlock = 128;  // tokens between two looks at the running maximum
constexpr int64_t kKvSplit = 1024;  // tokens of one task; alone decides the order of sums
constexpr int64_t kKvMaxDim = 256;
constexpr int64_t kKvTiles = kKvBlock / kKvTile;

// One side, K or V, of a cache.
struct KvSide {
  KvKind kind;
  KvScales scales;
  bool exact;  // products in fp32, for fp32 models: codes are widened first
  int64_t dim;
  int64_t tile_bytes;    // codes of one tile
  int64_t scales_bytes;  // one set of scales
  int64_t codes_at, scales_at, head_bytes;  // offsets in a page, of head 0, and to the next head
  const float* codebook;   // turboquant: [2^b]
  const int16_t* table;    // the codebook in steps of `step`, repeated to 32 entries; or null
  float step;              // 1 without a table
  float limit;             // what the absolute sum of 16-bit operands may reach beside its codes
};

// One sequence's tokens of one kv head, as a task sees them.
struct KvSequence {
  const uint8_t* pages;
  int64_t page_bytes, page_size, head;
  const int32_t* block_row;
  const uint8_t* tail;  // two tiles of keys of the open group, of side `tail_side`; or null
  int64_t tail_begin;   // first position of the open group
  int64_t length;
  // Where this thread goes on after its stretch: its tiles are fetched early. -1 if nowhere.
  int64_t next_head, next_begin;
};

// Query vectors of one kv head and what they have seen so far.
struct KvQueries {
  int64_t count;
  const float* q;       // [count][D], scaled, rotated
  const int32_t* q16;   // [count][D/2] pairs of 16 bits, where K's scales are not per channel
  const float* q_step;  // [count]: value of one unit of q16
  const float* q_sum;   // [count]
  const bool* q_wide;   // [count]: 16 bits are too coarse for it
  const int64_t* low;   // [count]: positions in [low, high) are seen, and those below `sink`
  const int64_t* high;
  int64_t sink;
  float soft_cap;  // 0 for none
  float* max;      // [count]
  float* sum;      // [count]
  float* acc;      // [count][Dv]
};

struct KvKernels {
  // Folds positions [begin, end) into fresh sums of all queries. `work` is work_bytes() long.
  void (*split)(const KvSequence& s, const KvSide& k, const KvSide& v, const KvSide& tail,
                const KvQueries& q, int64_t begin, int64_t end, void* work);
  int64_t (*work_bytes)(const KvSide& k, const KvSide& v);
  // q16 and its step, so that sums with codes of side `k` stay inside 32 bits.
  void (*round_query)(const KvSide& k, const float* q, int32_t* q16, float* step, float* sum, bool* wide);
  // Folds (max, sum, acc) of `other` into the first.
  void (*merge)(float* max, float* sum, float* acc, float other_max, float other_sum,
                const float* other, int64_t dim);
  // out[i][:] = x[i] @ matrix [dim, dim], both fp32.
  void (*rotate)(const float* x, const float* matrix, float* out, int64_t rows, int64_t dim);
  // Floats times `scale` to fp32 and back, `count` a multiple of 16.
  void (*load)(const void* src, FloatKind kind, float scale, float* dst, int64_t count);
  void (*store)(const float* src, float scale, void* dst, FloatKind kind, int64_t count);
  void (*halves)(const uint16_t* src, float* dst, int64_t count);
  // One vector's codes and its scales (scale, then minimum), or 32 vectors' [32][dim] with those of
  // each channel. `factor` is what fp8 codes are multiplied with.
  void (*quantize)(const KvSide& side, const float* x, float factor, uint32_t* codes,
                   uint16_t* scales);
  void (*quantize_group)(const KvSide& side, const float* x, uint32_t* codes, uint16_t* scales);
  // The direction of x, to be rotated, and its length: NaN and a direction of 0 for one with NaN or inf.
  float (*direction)(const float* x, float* unit, int64_t dim);
  // Codes of a rotated direction; `correct` makes what is read back as long as x.
  void (*quantize_rotated)(const KvSide& side, const float* rotated, float length, bool correct,
                           uint32_t* codes, uint16_t* scales);
};

extern const KvKernels kKvAvx2;
extern const KvKernels kKvAvx512;
extern const KvKernels kKvAvx512Vnni;

}  // namespace hal_cpu
