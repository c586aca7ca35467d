// Grouped product of 16-bit rows with four-bit weights: each weight is widened and rounded to the rows' type, sums are float32.
#pragma once
#include "grouped.hpp"
#include "int4.hpp"

#ifdef HAL_FP16
#define HAL_ROW hal::half
#else
#define HAL_ROW hal::bf16
#endif

namespace hal {

/// The B operand of one step in the lane's own column.
template <typename T> inline void widened_b(sycl::sub_group group, typename Engine<T>::B &b, uint32_t *local, const Int4Matrix &m,
                                            size_t expert, int at, int column, int n, int k) {
  constexpr int WORDS = Engine<T>::K / 8;
  Eight4 eight[WORDS];
  HAL_PART for (int i = 0; i < WORDS; ++i) eight[i] = Eight4(m, expert, at / 8 + i, column, n, k);
  Engine<T>::make_b(group, b, local, [&](int j) {
    const auto low = sycl::bit_cast<uint16_t>(narrowed<T>(eight[j / 4].weight(j % 4 * 2)));
    const auto high = sycl::bit_cast<uint16_t>(narrowed<T>(eight[j / 4].weight(j % 4 * 2 + 1)));
    return low | static_cast<uint32_t>(high) << 16;
  });
}

/// RM x RN tiles of one sub-group. Rows beyond `rows` are read, so that A has room for RM * TM more than there are, and not stored.
template <typename T, int RM, int RN, bool GATED>
inline void int4_tile(sycl::sub_group group, const Tiles &tile, const T *a, const float *a_scales, Int4Matrix gate, Int4Matrix up, int n, int k, const Epilogue &to,
                      uint32_t *local) {
  using E = Engine<T>;
  typename E::C sums[RM][RN], gates[RM][RN];
  HAL_LOOP for (int i = 0; i < RM; ++i)
    HAL_LOOP for (int j = 0; j < RN; ++j) {
      E::zero(group, sums[i][j]);
      if constexpr (GATED) E::zero(group, gates[i][j]);
    }
  const int lane = static_cast<int>(group.get_local_linear_id());
  const T *rows = a + static_cast<size_t>(tile.row) * k;
  for (int at = 0; at < k; at += E::K) {
    typename E::A left[RM];
    HAL_LOOP for (int i = 0; i < RM; ++i) E::load_a(group, left[i], rows + static_cast<size_t>(i * TM) * k + at, k);
    HAL_LOOP for (int j = 0; j < RN; ++j) {
      const int column = within(tile.column + j * TN, n) + lane;
      typename E::B right;
      widened_b<T>(group, right, local, up, tile.expert, at, column, n, k);
      HAL_LOOP for (int i = 0; i < RM; ++i) E::mad(group, sums[i][j], left[i], right);
      if constexpr (GATED) {
        widened_b<T>(group, right, local, gate, tile.expert, at, column, n, k);
        HAL_LOOP for (int i = 0; i < RM; ++i) E::mad(group, gates[i][j], left[i], right);
      }
    }
  }
  HAL_LOOP for (int j = 0; j < RN; ++j) {
    if (tile.column + j * TN >= n) continue;
    const int column = tile.column + j * TN + lane;
    const size_t own = static_cast<size_t>(tile.expert) * n + column;
    const float bias = to.up_bias ? to.up_bias[own] : 0.0f, gate_bias = GATED && to.gate_bias ? to.gate_bias[own] : 0.0f;
    HAL_LOOP for (int i = 0; i < RM; ++i) {
      float other[TM];
      if constexpr (GATED) E::each(group, gates[i][j], local, [&](int r, float sum) { other[r] = sum; });
      E::each(group, sums[i][j], local, [&](int r, float sum) {
        if (i * TM + r >= tile.rows) return;
        const int row = tile.row + i * TM + r;
        const float scale = a_scales ? a_scales[row] : 1.0f, first = GATED ? other[r] * scale + gate_bias : 0.0f;
        const float value = combined(first, sum * scale + bias, GATED, to.activation, to.alpha, to.limit);
        store_float(to.out, to.kind, static_cast<size_t>(row) * n + column, value);
      });
    }
  }
}

} // namespace hal

// a_scales of rows and gate may be null, this where GATED is 0. offsets: places where the rows of each expert start, and the end.
#define HAL_GROUPED_INT4(NAME, RM, RN, GATED)                                                                                            \
  HAL_KERNEL void NAME(const void *a, const float *a_scales, const int *offsets, int experts, const uint32_t *gate,                      \
                       const void *gate_scales,                                                                                          \
                       const unsigned char *gate_zeros, const void *gate_minimums, int gate_kind, const float *gate_bias,                \
                       const uint32_t *up, const void *up_scales, const unsigned char *up_zeros, const void *up_minimums, int up_kind,   \
                       const float *up_bias, int n, int k, int columns, void *out, int kind, int activation, float alpha,                \
                       float limit) {                                                                                                    \
    HAL_LOCAL(local);                                                                                                                    \
    const auto group = hal::this_item().get_sub_group();                                                                                 \
    uint32_t *own = &local[0] + group.get_group_linear_id() * hal::ENGINE_WORDS;                                                         \
    hal::over_tiles(offsets, experts, (RM) * hal::TM, (RN) * hal::TN, n, [&](const hal::Tiles &tile) {                                       \
      hal::int4_tile<HAL_ROW, RM, RN, GATED>(group, tile, static_cast<const HAL_ROW *>(a), a_scales,                                     \
                                             {gate, gate_scales, gate_zeros, gate_minimums, gate_kind, columns},                         \
                                             {up, up_scales, up_zeros, up_minimums, up_kind, columns}, n, k,                             \
                                             {gate_bias, up_bias, out, kind, activation, alpha, limit}, own);                            \
    });                                                                                                                                  \
  }

HAL_LADDER(HAL_GROUPED_INT4, grouped_int4, 0)
HAL_LADDER(HAL_GROUPED_INT4, gated_int4, 1)
