// What attention over packed pages needs beside simd_avx512.h: sixteen lanes, each a pair of
// 16-bit numbers. Included inside an anonymous namespace.
constexpr int kTilesAtOnce = 2;   // tiles of K that share one broadcast of the query
constexpr int kGroupsAtOnce = 2;  // groups of 16 channels of V that share one of the weights

HAL_INLINE VI izero() { return _mm512_setzero_si512(); }
HAL_INLINE void istore(int32_t* p, VI v) { _mm512_storeu_si512(p, v); }
HAL_INLINE VI dot_pairs(VI sum, VI a, VI b) {
#ifdef HAL_VNNI
  return _mm512_dpwssd_epi32(sum, a, b);
#else
  return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
#endif
}
HAL_INLINE VF to_float(VI v) { return _mm512_cvtepi32_ps(v); }
HAL_INLINE VI to_int(VF v) { return _mm512_cvtps_epi32(v); }
template <int N>
HAL_INLINE VI shr16(VI v) { return _mm512_srli_epi16(v, N); }
template <int N>
HAL_INLINE VI sar16(VI v) { return _mm512_srai_epi16(v, N); }
template <int N>
HAL_INLINE VI shl16(VI v) { return _mm512_slli_epi16(v, N); }
HAL_INLINE VI iand(VI a, VI b) { return _mm512_and_si512(a, b); }
// Words of 16 bits, whose bytes become the low bytes of the halves of 32.
HAL_INLINE VI iload_narrow(const int32_t* p) {
  const VI v = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
  return iand(_mm512_or_si512(v, _mm512_slli_epi32(v, 8)), _mm512_set1_epi32(0x00ff00ff));
}
HAL_INLINE VI low_byte_shift(VI v, bool shift) { return shift ? _mm512_srli_epi16(v, 8) : v; }

// Bits of the index above the table's own are free: the table is repeated to 32 entries.
struct Table {
  VI all;
};
HAL_INLINE Table load_table(const int16_t* p) { return {_mm512_loadu_si512(p)}; }
template <int BITS>
HAL_INLINE VI lookup16(const Table& t, VI index) { return _mm512_permutexvar_epi16(index, t.all); }
// Two bits of `low`, the third from `high`, already in its place.
HAL_INLINE VI join3(VI low, VI high) {
  return _mm512_ternarylogic_epi32(_mm512_set1_epi16(3), low, high, 0xca);
}

// Signed 16-bit pairs to fp32.
HAL_INLINE void widen_int_pair(VI v, VF* even, VF* odd) {
  *even = to_float(_mm512_srai_epi32(_mm512_slli_epi32(v, 16), 16));
  *odd = to_float(_mm512_srai_epi32(v, 16));
}
// Sixteen floats, to be looked up.
struct Book {
  __m512 all;
};
HAL_INLINE Book load_book(const float* p) { return {_mm512_loadu_ps(p)}; }
HAL_INLINE void lookup_pair(const Book& b, VI v, VF* even, VF* odd) {
  *even = _mm512_permutexvar_ps(v, b.all);
  *odd = _mm512_permutexvar_ps(_mm512_srli_epi32(v, 16), b.all);
}

HAL_INLINE void widen_bf16_pair(VI v, VF* even, VF* odd) {
  *even = _mm512_castsi512_ps(_mm512_slli_epi32(v, 16));
  *odd = _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32((int)0xffff0000)));
}
HAL_INLINE void widen_half_pair(VI v, VF* even, VF* odd) {
  *even = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(v));
  *odd = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(v, 16)));
}
// e4m3 in the high byte of each half, to fp16 of 2^-8 times the value; its NaN stays one.
HAL_INLINE VI half_of_fp8(VI high_bytes) {
  const VI h = iand(sar16<1>(high_bytes), _mm512_set1_epi16((short)0xbf80));
  const __mmask32 nan = _mm512_cmpeq_epi16_mask(iand(h, _mm512_set1_epi16(0x3f80)), _mm512_set1_epi16(0x3f80));
  return _mm512_mask_mov_epi16(h, nan, _mm512_set1_epi16(0x7e00));
}

using Mask = __mmask16;
HAL_INLINE Mask mask_range(int64_t low, int64_t high) {
  const uint32_t below = high >= 16 ? 0xffffu : high <= 0 ? 0u : (1u << high) - 1u;
  const uint32_t under = low >= 16 ? 0xffffu : low <= 0 ? 0u : (1u << low) - 1u;
  return (Mask)(below & ~under);
}
HAL_INLINE Mask mask_or(Mask a, Mask b) { return (Mask)(a | b); }
HAL_INLINE VF choose(Mask m, VF yes, VF no) { return _mm512_mask_mov_ps(no, m, yes); }
// Lanes that are not -inf, NaN among them.
HAL_INLINE Mask above_nothing(VF v) {
  return _mm512_cmp_ps_mask(v, _mm512_set1_ps(-__builtin_inff()), _CMP_NEQ_UQ);
}
HAL_INLINE Mask finite(VF v) {
  return _mm512_cmp_ps_mask(_mm512_abs_ps(v), _mm512_set1_ps(__builtin_inff()), _CMP_LT_OQ);
}
HAL_INLINE Mask over(VF a, VF b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
// Bits of |v|, in the order of the values, NaN above all: a maximum of them keeps a NaN.
HAL_INLINE VI abs_bits(VF v) {
  return _mm512_and_si512(_mm512_castps_si512(v), _mm512_set1_epi32(0x7fffffff));
}
HAL_INLINE VI imax(VI a, VI b) { return _mm512_max_epi32(a, b); }
HAL_INLINE int32_t himax(VI v) { return _mm512_reduce_max_epi32(v); }
HAL_INLINE VF vabs(VF v) { return _mm512_abs_ps(v); }
HAL_INLINE float hmax(VF v) { return _mm512_reduce_max_ps(v); }
HAL_INLINE float hsum(VF v) {
  __m256 a = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}
// Sixteen 32-bit integers to 16 bits.
HAL_INLINE void store16(int16_t* p, VI v) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtsepi32_epi16(v));
}
