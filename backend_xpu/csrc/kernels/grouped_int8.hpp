// Grouped product of int8 rows with int8 weights of one scale a column: int32 sums over the whole of K, then both scales.
#pragma once
#include "grouped.hpp"

namespace hal {

/// One matrix of every expert: words [E, K/4, N], scales [E, N].
struct Int8Matrix {
  const uint32_t *words;
  const float *scales;
};

/// RM x RN tiles of one sub-group. Rows beyond `rows` are read, so that A has room for RM * TM more than there are, and not stored.
template <int RM, int RN, bool GATED>
inline void int8_tile(sycl::sub_group group, const Tiles &tile, const signed char *a, const float *a_scales, Int8Matrix gate, Int8Matrix up,
                      int n, int k, const Epilogue &to, uint32_t *local) {
  using E = Engine<signed char>;
  typename E::C sums[RM][RN], gates[RM][RN];
  HAL_LOOP for (int i = 0; i < RM; ++i)
    HAL_LOOP for (int j = 0; j < RN; ++j) {
      E::zero(group, sums[i][j]);
      if constexpr (GATED) E::zero(group, gates[i][j]);
    }
  const size_t matrix = static_cast<size_t>(tile.expert) * (k / 4) * n;
  const signed char *rows = a + static_cast<size_t>(tile.row) * k;
  for (int at = 0; at < k; at += KB) {
    typename E::A left[RM];
    HAL_LOOP for (int i = 0; i < RM; ++i) E::load_a(group, left[i], rows + static_cast<size_t>(i * TM) * k + at, k);
    HAL_LOOP for (int j = 0; j < RN; ++j) {
      const int column = within(tile.column + j * TN, n);
      const size_t from = matrix + static_cast<size_t>(at / 4) * n + column;
      typename E::B right;
      E::load_b(group, right, up.words + from, n);
      HAL_LOOP for (int i = 0; i < RM; ++i) E::mad(group, sums[i][j], left[i], right);
      if constexpr (GATED) {
        E::load_b(group, right, gate.words + from, n);
        HAL_LOOP for (int i = 0; i < RM; ++i) E::mad(group, gates[i][j], left[i], right);
      }
    }
  }
  HAL_LOOP for (int j = 0; j < RN; ++j) {
    const int column = tile.column + j * TN + static_cast<int>(group.get_local_linear_id());
    if (tile.column + j * TN >= n) continue;
    const size_t lane = static_cast<size_t>(tile.expert) * n + column;
    const float scale = up.scales[lane], bias = to.up_bias ? to.up_bias[lane] : 0.0f;
    const float gate_scale = GATED ? gate.scales[lane] : 0.0f, gate_bias = GATED && to.gate_bias ? to.gate_bias[lane] : 0.0f;
    HAL_LOOP for (int i = 0; i < RM; ++i) {
      float other[TM];
      if constexpr (GATED) E::each(group, gates[i][j], local, [&](int r, int sum) { other[r] = static_cast<float>(sum) * gate_scale; });
      E::each(group, sums[i][j], local, [&](int r, int sum) {
        if (i * TM + r >= tile.rows) return;
        const int row = tile.row + i * TM + r;
        const float value = static_cast<float>(sum) * scale * a_scales[row] + bias;
        const float first = GATED ? other[r] * a_scales[row] + gate_bias : 0.0f;
        store_float(to.out, to.kind, static_cast<size_t>(row) * n + column, combined(first, value, GATED, to.activation, to.alpha, to.limit));
      });
    }
  }
}

} // namespace hal

// Gate may be null where GATED is 0. offsets: places where the rows of each expert start, and the end.
#define HAL_GROUPED_INT8(NAME, RM, RN, GATED)                                                                                            \
  HAL_KERNEL void NAME(const signed char *a, const float *a_scales, const int *offsets, int experts, const uint32_t *gate,               \
                       const float *gate_scales, const float *gate_bias, const uint32_t *up, const float *up_scales,                     \
                       const float *up_bias, int n, int k, void *out, int kind, int activation, float alpha, float limit) {              \
    HAL_LOCAL(local);                                                                                                                    \
    const auto group = hal::this_item().get_sub_group();                                                                                 \
    uint32_t *own = &local[0] + group.get_group_linear_id() * hal::ENGINE_WORDS;                                                         \
    hal::over_tiles(offsets, experts, (RM) * hal::TM, (RN) * hal::TN, n, [&](const hal::Tiles &tile) {                                       \
      hal::int8_tile<RM, RN, GATED>(group, tile, a, a_scales, {gate, gate_scales}, {up, up_scales}, n, k,                                \
                                    {gate_bias, up_bias, out, kind, activation, alpha, limit}, own);                                     \
    });                                                                                                                                  \
  }

HAL_LADDER(HAL_GROUPED_INT8, grouped_int8, 0)
HAL_LADDER(HAL_GROUPED_INT8, gated_int8, 1)
