// What a cache is, as the KV ops receive it: checked, with its places in a page worked out.
#pragma once
#include <array>
#include <string>
#include <string_view>

#include "args.h"
#include "checks.h"
#include "kv.h"

namespace hal_cpu {

// The kernels of level `name`: avx2, avx512 or avx512vnni. Throws if it is unknown or not usable.
const KvKernels& kv_kernels_for(std::string_view name);

// One side as the ops receive it. scheme: bf16, fp16, fp32, fp8, int8:channel, int8:token,
// int4:channel, int4:token, turboquant:2 to 4, and that with ":raw".
struct KvSideArguments {
  std::string scheme;
  std::optional<Tensor> codebook;  // turboquant: fp32 [2^b]
  std::optional<Tensor> rotation;  // turboquant: fp32 [2, D, D], transposed and as it is
  std::optional<Tensor> scale;     // fp8: fp32 [heads], positive
};

struct KvSideConfig {
  KvSide side{};
  bool correct = false;
  const float* to_rotated = nullptr;    // x @ this: into the rotated channels
  const float* from_rotated = nullptr;  // and back
  const float* static_scale = nullptr;  // [heads]
  alignas(64) std::array<int16_t, 32> table{};

  bool grouped() const { return side.scales == kKvChannel || side.scales == kKvChannelMin; }
  float head_scale(int64_t head) const { return static_scale ? static_scale[head] : 1.0f; }
};

struct KvArguments {
  int64_t page_size, heads, key_dim, value_dim;
  KvSideArguments keys, values;
};

struct KvConfig {
  int64_t page_size, heads, page_bytes, tail_bytes;
  KvSideConfig keys, values;
  KvSide tail{};  // keys of an open group, in the floats of the model

  KvConfig(const KvArguments& a, FloatKind dtype);
  // `table` moves with the object.
  KvConfig(const KvConfig&) = delete;
  KvConfig& operator=(const KvConfig&) = delete;
};

KvArguments read_kv_arguments(Args& args);

// uint8 [pages, page_bytes], and [n, tail_bytes] where the cache has tails.
void check_pages(const Tensor& pages, const KvConfig& c);
void check_tails(const std::optional<Tensor>& tails, const std::optional<Tensor>& ids, int64_t count,
                 const char* per, const KvConfig& c);

// One vector's codes into and out of the tile that holds token `lane`.
void put_codes(const KvSide& side, bool key, uint8_t* tile, int64_t token, const uint32_t* codes);
void get_codes(const KvSide& side, bool key, const uint8_t* tile, int64_t token, uint32_t* codes);

// Where a token's tile and its scales begin.
struct KvPlace {
  int64_t tile, scales, token;
};
KvPlace kv_place(const KvSide& side, int64_t head, int64_t offset);

}  // namespace hal_cpu
