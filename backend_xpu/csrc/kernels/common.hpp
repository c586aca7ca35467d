// What all kernels share: how they are declared, floats of three types, activation functions, expert ids.
#pragma once
#include <cstdint>
#include <sycl/sycl.hpp>
#include <sycl/ext/oneapi/work_group_static.hpp>

#ifndef HAL_SG
#define HAL_SG 16
#endif

namespace hal {

namespace syclex = sycl::ext::oneapi::experimental;
using bf16 = sycl::ext::oneapi::bfloat16;
using half = sycl::half;
constexpr float INF = __builtin_inff();

// Free functions, found by their name in a program that is compiled at run time.
#define HAL_KERNEL                                                                                                                       \
  extern "C" SYCL_EXT_ONEAPI_FUNCTION_PROPERTY((sycl::ext::oneapi::experimental::nd_range_kernel<3>))                                    \
      SYCL_EXT_ONEAPI_FUNCTION_PROPERTY((sycl::ext::oneapi::experimental::sub_group_size<HAL_SG>))

inline sycl::nd_item<3> this_item() { return sycl::ext::oneapi::this_work_item::get_nd_item<3>(); }

/// As Python passes them.
enum Float : int { FP32 = 0, BF16 = 1, FP16 = 2 };

// By their bits: the runtime's own conversions come as a second program that would have to be linked at every start.
inline float widened(bf16 x) { return sycl::bit_cast<float>(static_cast<uint32_t>(sycl::bit_cast<uint16_t>(x)) << 16); }
inline float widened(half x) { return static_cast<float>(x); }
template <typename T> inline T narrowed(float x);
template <> inline half narrowed<half>(float x) { return static_cast<half>(x); }
template <> inline bf16 narrowed<bf16>(float x) {
  const uint32_t bits = sycl::bit_cast<uint32_t>(x);
  const uint32_t up = x == x ? 0x7fff + (bits >> 16 & 1) : 0; // to nearest, ties to even; a NaN stays one
  return sycl::bit_cast<bf16>(static_cast<uint16_t>((bits + up) >> 16 | (x == x ? 0 : 0x40)));
}

inline float load_float(const void *from, int kind, size_t at) {
  if (kind == FP32) return static_cast<const float *>(from)[at];
  if (kind == BF16) return widened(static_cast<const bf16 *>(from)[at]);
  return widened(static_cast<const half *>(from)[at]);
}

inline void store_float(void *to, int kind, size_t at, float value) {
  if (kind == FP32) static_cast<float *>(to)[at] = value;
  else if (kind == BF16) static_cast<bf16 *>(to)[at] = narrowed<bf16>(value);
  else static_cast<half *>(to)[at] = narrowed<half>(value);
}

/// Activation functions of experts, in the order of Python's table; NONE is a plain product.
enum Activation : int { NONE = 0, SILU = 1, GELU = 2, GELU_TANH = 3, SWIGLU_OAI = 4, RELU2 = 5 };

inline float sigmoid(float x) { return 1.0f / (1.0f + sycl::exp(-x)); }

inline float activated(float x, int kind, float alpha) {
  switch (kind) {
  case SILU: return x * sigmoid(x);
  case GELU: return 0.5f * x * (1.0f + sycl::erf(x * 0.70710678118654752f));
  case GELU_TANH: return 0.5f * x * (1.0f + sycl::tanh(0.79788456080286536f * (x + 0.044715f * x * x * x)));
  case SWIGLU_OAI: return x * sigmoid(alpha * x);
  case RELU2: return x > 0.0f ? x * x : (x != x ? x : 0.0f);
  default: return x;
  }
}

// fmin and fmax drop a NaN, which has to stay in its row
inline float clipped(float x, float low, float high) { return x < low ? low : (x > high ? high : x); }

/// gate and up to what the down matrix takes; `limit` is infinity for none. Without a gate the function is of `up`.
inline float combined(float gate, float up, bool gated, int kind, float alpha, float limit) {
  up = clipped(up, -limit, limit);
  if (!gated) return activated(up, kind, alpha);
  gate = clipped(gate, -INF, limit);
  return activated(gate, kind, alpha) * (kind == SWIGLU_OAI ? up + 1.0f : up);
}

/// The expert of a slot here, -1 for none. An id or a map entry out of range is -1 too, and `wrong` is set.
inline int local_expert(const void *ids, int wide, const int *map, size_t slot, int experts, int local, bool &wrong) {
  const int64_t id = wide ? static_cast<const int64_t *>(ids)[slot] : static_cast<const int *>(ids)[slot];
  wrong = id < -1 || id >= experts;
  if (wrong || id < 0) return -1;
  const int found = map ? map[id] : static_cast<int>(id);
  wrong = found < -1 || found >= local;
  return wrong ? -1 : found;
}

/// The word that hal_core.check reads: slot + 1 above, the id below; then the slots of a token.
inline void report(int64_t *flag, const void *ids, int wide, size_t slot, int top_k) {
  const int64_t id = wide ? static_cast<const int64_t *>(ids)[slot] : static_cast<const int *>(ids)[slot];
  flag[1] = top_k;
  flag[0] = (static_cast<int64_t>(slot + 1) << 32) | (id & 0xffffffff);
}

} // namespace hal
