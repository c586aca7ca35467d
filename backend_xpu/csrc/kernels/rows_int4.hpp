// Few rows: each sub-group multiplies one row by as many columns of four-bit weights as it has lanes; exact, float32 sums.
#pragma once
#include "int4.hpp"

namespace hal {

/// Sub-groups of a work-group, which share the K of one row and meet in local memory.
constexpr int SPLIT = 4;

inline float dot_eight(const Eight4 &w, const float (&x)[8]) {
  float with = 0.0f, alone = 0.0f;
  for (int i = 0; i < 8; ++i) {
    with += w.code(i) * x[i];
    alone += x[i];
  }
  return with * w.scale + alone * w.minimum;
}

} // namespace hal

/// out[row] = activation of gate and up, or up alone where gate is null. Row of x: row / top_k; expert: slot_expert[row] (-1: left out), or 0.
HAL_KERNEL void rows_int4(const void *x, int x_kind, int top_k, const int *slot_expert, const float *row_weights, const uint32_t *gate,
                          const void *gate_scales, const unsigned char *gate_zeros, const void *gate_minimums, int gate_kind,
                          const float *gate_bias, const uint32_t *up, const void *up_scales, const unsigned char *up_zeros,
                          const void *up_minimums, int up_kind, const float *up_bias, int n, int k, int columns, void *out, int kind,
                          int activation, float alpha, float limit) {
  using namespace hal;
  syclex::work_group_static<float[2 * SPLIT * HAL_SG]> met;
  const auto item = this_item();
  const auto group = item.get_sub_group();
  const size_t row = item.get_group(1);
  const int expert = slot_expert ? slot_expert[row] : 0;
  if (expert < 0) return; // the whole work-group
  const int lane = static_cast<int>(group.get_local_linear_id()), part = static_cast<int>(group.get_group_linear_id());
  const int column = static_cast<int>(item.get_group(2)) * HAL_SG + lane;
  const Int4Matrix first{gate, gate_scales, gate_zeros, gate_minimums, gate_kind, columns};
  const Int4Matrix second{up, up_scales, up_zeros, up_minimums, up_kind, columns};
  const size_t from = row / top_k * k;
  float gates = 0.0f, sums = 0.0f;
  for (int at = part; at < k / 8; at += SPLIT) {
    float values[8];
    for (int i = 0; i < 8; ++i) values[i] = load_float(x, x_kind, from + at * 8 + i);
    sums += dot_eight(Eight4(second, expert, at, column, n, k), values);
    if (gate) gates += dot_eight(Eight4(first, expert, at, column, n, k), values);
  }
  float *own = &met[0] + part * HAL_SG + lane;
  own[0] = sums;
  own[SPLIT * HAL_SG] = gates;
  sycl::group_barrier(item.get_group());
  if (part != 0) return;
  sums = gates = 0.0f;
  for (int i = 0; i < SPLIT; ++i) {
    sums += own[i * HAL_SG];
    gates += own[(SPLIT + i) * HAL_SG];
  }
  const float weight = row_weights ? row_weights[row] : 1.0f;
  const size_t bias = static_cast<size_t>(expert) * n + column;
  sums = sums * weight + (up_bias ? up_bias[bias] : 0.0f);
  gates = gates * weight + (gate_bias ? gate_bias[bias] : 0.0f);
  store_float(out, kind, row * n + column, combined(gates, sums, gate != nullptr, activation, alpha, limit));
}
