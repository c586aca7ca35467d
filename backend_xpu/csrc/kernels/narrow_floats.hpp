// Product of bf16 rows with weights of 8 or 4 bits that are floats: e4m3, and e2m1 of the MX types. Codes are decoded by hand, for no
// GPU before Xe3 has an instruction and the runtime's own types need an extension of SPIR-V that few drivers take.
#pragma once
#include "engine.hpp"

namespace hal {

// Decoders are free of branches: lanes that part ways cost more than both ways. All ones where a condition holds:
inline uint32_t mask_of(bool condition) { return 0u - static_cast<uint32_t>(condition); }

/// A magnitude with the exponent of normal numbers; where the code's own is 0 the leading one, `unit`, is taken off again, which is
/// exact and needs no subnormal float, for devices may flush these.
inline float magnitude_of(uint32_t exponent, uint32_t bias, uint32_t mantissa) {
  const uint32_t small = mask_of(exponent == 0), field = (exponent + bias + (small & 1)) << 23;
  return sycl::bit_cast<float>(field | mantissa) - sycl::bit_cast<float>(field & small);
}

/// e4m3fn: four bits of exponent with a bias of 7, three of mantissa, no infinity.
inline float from_e4m3(uint32_t code) {
  const uint32_t bits = sycl::bit_cast<uint32_t>(magnitude_of(code >> 3 & 15, 120, (code & 7) << 20));
  return sycl::bit_cast<float>(bits | (code & 0x80) << 24 | (mask_of((code & 0x7f) == 0x7f) & 0x7fc00000));
}

/// The nearest e4m3fn of a number, ties to even; it saturates at 448.
inline unsigned char to_e4m3(float x) {
  const uint32_t bits = sycl::bit_cast<uint32_t>(x), sign = bits >> 24 & 0x80;
  const float magnitude = sycl::fabs(x);
  if (magnitude >= 448.0f) return static_cast<unsigned char>(0x7e | sign);
  if (magnitude < 0x1p-6f) return static_cast<unsigned char>(static_cast<uint32_t>(sycl::rint(magnitude * 0x1p9f)) | sign); // 8 is 2^-6
  const uint32_t plain = bits & 0x7fffffff, up = 0x7ffff + (plain >> 20 & 1);
  return static_cast<unsigned char>(((plain + up) >> 20) - (120 << 3) | sign);
}

/// e2m1: two bits of exponent with a bias of 1, one of mantissa.
inline float from_e2m1(uint32_t code) {
  const uint32_t bits = sycl::bit_cast<uint32_t>(magnitude_of(code >> 1 & 3, 126, (code & 1) << 22));
  return sycl::bit_cast<float>(bits | (code & 8) << 28);
}

/// The bits of the nearest bf16, ties to even.
inline uint32_t bf16_bits(float x) {
  const uint32_t bits = sycl::bit_cast<uint32_t>(x), nan = mask_of((bits & 0x7fffffff) > 0x7f800000);
  return ((bits + 0x7fff + (bits >> 16 & 1)) >> 16 & ~nan) | (0x7fc0 & nan);
}

/// A weight [N, K]: words [K * BITS / 32, N] with the first code lowest; scales [K / group, N], or null.
struct NarrowMatrix {
  const uint32_t *words;
  const float *scales;
  int n, k, group;
};

/// Elements k and k + 1 of a column as a word of bf16. A scale is multiplied on before the rounding.
template <int BITS> inline uint32_t pair_of(const NarrowMatrix &matrix, int k, int column) {
  constexpr int EACH = 32 / BITS;
  const uint32_t codes = matrix.words[static_cast<size_t>(k / EACH) * matrix.n + column] >> (k % EACH * BITS);
  const float scale = matrix.scales ? matrix.scales[static_cast<size_t>(k / matrix.group) * matrix.n + column] : 1.0f;
  const float low = BITS == 8 ? from_e4m3(codes & 0xff) : from_e2m1(codes & 15);
  const float high = BITS == 8 ? from_e4m3(codes >> 8 & 0xff) : from_e2m1(codes >> 4 & 15);
  return bf16_bits(low * scale) | bf16_bits(high * scale) << 16;
}

/// What becomes of a sum: times its column's scale, plus its bias; either may be null.
struct NarrowEpilogue {
  const float *column_scales, *bias;
  void *out;
  int kind;
};

/// RM x RN tiles of one sub-group. Rows beyond m are read, so that A has room for RM * TM more than there are, and not stored.
template <int RM, int RN, int BITS>
inline void narrow_tile(sycl::sub_group group, const bf16 *a, const NarrowMatrix &matrix, int m, int row, int first, const NarrowEpilogue &to,
                        uint32_t *local) {
  using E = Engine<bf16>;
  typename E::C sums[RM][RN];
  HAL_LOOP for (int i = 0; i < RM; ++i)
    HAL_LOOP for (int j = 0; j < RN; ++j) E::zero(group, sums[i][j]);
  const int lane = static_cast<int>(group.get_local_linear_id());
  for (int at = 0; at < matrix.k; at += E::K) {
    typename E::A left[RM];
    HAL_LOOP for (int i = 0; i < RM; ++i) E::load_a(group, left[i], a + static_cast<size_t>(row + i * TM) * matrix.k + at, matrix.k);
    HAL_LOOP for (int j = 0; j < RN; ++j) {
      const int column = first + j * TN;
      if (column >= matrix.n) continue;
      typename E::B right;
      E::make_b(group, right, local, [&](int word) { return pair_of<BITS>(matrix, at + 2 * word, column + lane); });
      HAL_LOOP for (int i = 0; i < RM; ++i) E::mad(group, sums[i][j], left[i], right);
    }
  }
  HAL_LOOP for (int j = 0; j < RN; ++j) {
    if (first + j * TN >= matrix.n) continue;
    const int column = first + j * TN + lane;
    const float scale = to.column_scales ? to.column_scales[column] : 1.0f, bias = to.bias ? to.bias[column] : 0.0f;
    HAL_LOOP for (int i = 0; i < RM; ++i)
      E::each(group, sums[i][j], local, [&](int r, float sum) {
        const int at = row + i * TM + r;
        if (at < m) store_float(to.out, to.kind, static_cast<size_t>(at) * matrix.n + column, sum * scale + bias);
      });
  }
}

template <int RM, int RN, int BITS>
inline void narrow_rows(const bf16 *a, const NarrowMatrix &matrix, int m, const NarrowEpilogue &to, uint32_t *local) {
  const auto item = this_item();
  const auto group = item.get_sub_group();
  const int here = static_cast<int>(group.get_group_linear_id()), each = static_cast<int>(group.get_group_linear_range());
  const int across = (matrix.n + RN * TN - 1) / (RN * TN), tiles = (m + RM * TM - 1) / (RM * TM) * across;
  const int step = static_cast<int>(item.get_group_range(2)) * each;
  for (int tile = static_cast<int>(item.get_group_linear_id()) * each + here; tile < tiles; tile += step) {
    const int down = tile / across;
    narrow_tile<RM, RN, BITS>(group, a, matrix, m, down * RM * TM, (tile - down * across) * RN * TN, to, local + here * ENGINE_WORDS);
  }
}

} // namespace hal

/// Of four sub-groups of a work-group.
#define HAL_NARROW_WORDS (4 * (hal::ENGINE_WORDS ? hal::ENGINE_WORDS : 1))

#define HAL_NARROW(NAME, RM, RN, BITS)                                                                                                   \
  HAL_KERNEL void NAME(const hal::bf16 *a, const uint32_t *words, const float *scales, const float *column_scales, const float *bias,    \
                       int m, int n, int k, int group, void *out, int kind) {                                                            \
    sycl::ext::oneapi::experimental::work_group_static<uint32_t[HAL_NARROW_WORDS]> local;                                                \
    hal::narrow_rows<RM, RN, BITS>(a, {words, scales, n, k, group}, m, {column_scales, bias, out, kind}, &local[0]);                     \
  }

// One tile of rows, or several: what is decoded serves all of them.
#if HAL_TM == 16
HAL_NARROW(e4m3_few, 1, 2, 8)
HAL_NARROW(e4m3_many, 2, 2, 8)
HAL_NARROW(e2m1_few, 1, 2, 4)
HAL_NARROW(e2m1_many, 2, 2, 4)
#else
HAL_NARROW(e4m3_few, 1, 2, 8)
HAL_NARROW(e4m3_many, 4, 2, 8)
HAL_NARROW(e2m1_few, 1, 2, 4)
HAL_NARROW(e2m1_many, 4, 2, 4)
#endif
