// What attention over packed pages needs beside simd_avx2.h: sixteen lanes, each a pair of 16-bit
// numbers. Included inside an anonymous namespace.
constexpr int kTilesAtOnce = 1;   // tiles of K that share one broadcast of the query
constexpr int kGroupsAtOnce = 1;  // groups of 16 channels of V that share one of the weights

HAL_INLINE VI izero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
HAL_INLINE void istore(int32_t* p, VI v) {
  _mm256_storeu_si256((__m256i*)p, v.lo);
  _mm256_storeu_si256((__m256i*)(p + 8), v.hi);
}
HAL_INLINE VI dot_pairs(VI sum, VI a, VI b) {
  return {_mm256_add_epi32(sum.lo, _mm256_madd_epi16(a.lo, b.lo)),
          _mm256_add_epi32(sum.hi, _mm256_madd_epi16(a.hi, b.hi))};
}
HAL_INLINE VF to_float(VI v) { return {_mm256_cvtepi32_ps(v.lo), _mm256_cvtepi32_ps(v.hi)}; }
HAL_INLINE VI to_int(VF v) { return {_mm256_cvtps_epi32(v.lo), _mm256_cvtps_epi32(v.hi)}; }
template <int N>
HAL_INLINE VI shr16(VI v) { return {_mm256_srli_epi16(v.lo, N), _mm256_srli_epi16(v.hi, N)}; }
template <int N>
HAL_INLINE VI sar16(VI v) { return {_mm256_srai_epi16(v.lo, N), _mm256_srai_epi16(v.hi, N)}; }
template <int N>
HAL_INLINE VI shl16(VI v) { return {_mm256_slli_epi16(v.lo, N), _mm256_slli_epi16(v.hi, N)}; }
HAL_INLINE VI iand(VI a, VI b) { return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)}; }
// Words of 16 bits, whose bytes become the low bytes of the halves of 32.
HAL_INLINE __m256i iload_narrow_part(const int32_t* p) {
  const __m256i v = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
  return _mm256_and_si256(_mm256_or_si256(v, _mm256_slli_epi32(v, 8)), _mm256_set1_epi32(0x00ff00ff));
}
HAL_INLINE VI iload_narrow(const int32_t* p) { return {iload_narrow_part(p), iload_narrow_part(p + 4)}; }
HAL_INLINE VI low_byte_shift(VI v, bool shift) {
  return shift ? VI{_mm256_srli_epi16(v.lo, 8), _mm256_srli_epi16(v.hi, 8)} : v;
}

// The table's low and high bytes, apart: there is no shuffle of 16-bit entries.
struct Table {
  __m256i low, high;
};
HAL_INLINE Table load_table(const int16_t* p) {
  const __m256i a = _mm256_loadu_si256((const __m256i*)p);
  const __m256i low = _mm256_packus_epi16(_mm256_and_si256(a, _mm256_set1_epi16(0xff)), _mm256_setzero_si256());
  const __m256i high = _mm256_packus_epi16(_mm256_srli_epi16(a, 8), _mm256_setzero_si256());
  // The sixteen bytes are in the low halves of both lanes.
  const __m256i l = _mm256_permute4x64_epi64(low, 0x88), h = _mm256_permute4x64_epi64(high, 0x88);
  return {l, h};
}
template <int BITS>
HAL_INLINE __m256i lookup16_part(const Table& t, __m256i index) {
  const __m256i code = _mm256_and_si256(index, _mm256_set1_epi16((1 << BITS) - 1));
  const __m256i both = _mm256_or_si256(code, _mm256_slli_epi16(code, 8));
  return _mm256_blendv_epi8(_mm256_shuffle_epi8(t.low, both), _mm256_shuffle_epi8(t.high, both),
                            _mm256_set1_epi16((short)0xff00));
}
template <int BITS>
HAL_INLINE VI lookup16(const Table& t, VI index) {
  return {lookup16_part<BITS>(t, index.lo), lookup16_part<BITS>(t, index.hi)};
}
HAL_INLINE __m256i join3_part(__m256i low, __m256i high) {
  const __m256i two = _mm256_set1_epi16(3);
  return _mm256_or_si256(_mm256_and_si256(two, low), _mm256_andnot_si256(two, high));
}
// Two bits of `low`, the third from `high`, already in its place.
HAL_INLINE VI join3(VI low, VI high) {
  return {join3_part(low.lo, high.lo), join3_part(low.hi, high.hi)};
}

// Signed 16-bit pairs to fp32.
HAL_INLINE void widen_int_pair(VI v, VF* even, VF* odd) {
  *even = to_float({_mm256_srai_epi32(_mm256_slli_epi32(v.lo, 16), 16), _mm256_srai_epi32(_mm256_slli_epi32(v.hi, 16), 16)});
  *odd = to_float({_mm256_srai_epi32(v.lo, 16), _mm256_srai_epi32(v.hi, 16)});
}
// Sixteen floats, to be looked up.
struct Book {
  __m256 low, high;
};
HAL_INLINE Book load_book(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
HAL_INLINE __m256 lookup_part(const Book& b, __m256i index) {
  const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(index, 28));
  return _mm256_blendv_ps(_mm256_permutevar8x32_ps(b.low, index), _mm256_permutevar8x32_ps(b.high, index), upper);
}
HAL_INLINE void lookup_pair(const Book& b, VI v, VF* even, VF* odd) {
  *even = {lookup_part(b, v.lo), lookup_part(b, v.hi)};
  *odd = {lookup_part(b, _mm256_srli_epi32(v.lo, 16)), lookup_part(b, _mm256_srli_epi32(v.hi, 16))};
}

HAL_INLINE void widen_bf16_pair(VI v, VF* even, VF* odd) {
  const __m256i mask = _mm256_set1_epi32((int)0xffff0000);
  *even = {_mm256_castsi256_ps(_mm256_slli_epi32(v.lo, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(v.hi, 16))};
  *odd = {_mm256_castsi256_ps(_mm256_and_si256(v.lo, mask)), _mm256_castsi256_ps(_mm256_and_si256(v.hi, mask))};
}
HAL_INLINE __m256 widen_half_part(__m256i v) {
  const __m256i packed = _mm256_packus_epi32(v, v);
  return _mm256_cvtph_ps(_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
}
HAL_INLINE void widen_half_pair(VI v, VF* even, VF* odd) {
  const __m256i mask = _mm256_set1_epi32(0xffff);
  *even = {widen_half_part(_mm256_and_si256(v.lo, mask)), widen_half_part(_mm256_and_si256(v.hi, mask))};
  *odd = {widen_half_part(_mm256_srli_epi32(v.lo, 16)), widen_half_part(_mm256_srli_epi32(v.hi, 16))};
}
HAL_INLINE __m256i half_of_fp8_part(__m256i v) {
  const __m256i h = _mm256_and_si256(_mm256_srai_epi16(v, 1), _mm256_set1_epi16((short)0xbf80));
  const __m256i most = _mm256_set1_epi16(0x3f80);
  const __m256i nan = _mm256_cmpeq_epi16(_mm256_and_si256(h, most), most);
  return _mm256_blendv_epi8(h, _mm256_set1_epi16(0x7e00), nan);
}
// e4m3 in the high byte of each half, to fp16 of 2^-8 times the value; its NaN stays one.
HAL_INLINE VI half_of_fp8(VI high_bytes) {
  return {half_of_fp8_part(high_bytes.lo), half_of_fp8_part(high_bytes.hi)};
}

using Mask = VF;  // all bits of a lane, or none
HAL_INLINE Mask mask_range(int64_t low, int64_t high) {
  const int l = low < 0 ? 0 : low > 16 ? 16 : (int)low, h = high < 0 ? 0 : high > 16 ? 16 : (int)high;
  const __m256i a = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), b = _mm256_add_epi32(a, _mm256_set1_epi32(8));
  const __m256i least = _mm256_set1_epi32(l - 1), most = _mm256_set1_epi32(h);
  return {_mm256_castsi256_ps(_mm256_and_si256(_mm256_cmpgt_epi32(a, least), _mm256_cmpgt_epi32(most, a))),
          _mm256_castsi256_ps(_mm256_and_si256(_mm256_cmpgt_epi32(b, least), _mm256_cmpgt_epi32(most, b)))};
}
HAL_INLINE Mask mask_or(Mask a, Mask b) { return {_mm256_or_ps(a.lo, b.lo), _mm256_or_ps(a.hi, b.hi)}; }
HAL_INLINE VF choose(Mask m, VF yes, VF no) {
  return {_mm256_blendv_ps(no.lo, yes.lo, m.lo), _mm256_blendv_ps(no.hi, yes.hi, m.hi)};
}
// Lanes that are not -inf, NaN among them.
HAL_INLINE Mask above_nothing(VF v) {
  const __m256 nothing = _mm256_set1_ps(-__builtin_inff());
  return {_mm256_cmp_ps(v.lo, nothing, _CMP_NEQ_UQ), _mm256_cmp_ps(v.hi, nothing, _CMP_NEQ_UQ)};
}
HAL_INLINE Mask finite(VF v) {
  const __m256 sign = _mm256_set1_ps(-0.0f), inf = _mm256_set1_ps(__builtin_inff());
  return {_mm256_cmp_ps(_mm256_andnot_ps(sign, v.lo), inf, _CMP_LT_OQ),
          _mm256_cmp_ps(_mm256_andnot_ps(sign, v.hi), inf, _CMP_LT_OQ)};
}
HAL_INLINE Mask over(VF a, VF b) {
  return {_mm256_cmp_ps(a.lo, b.lo, _CMP_GT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_GT_OQ)};
}
// Bits of |v|, in the order of the values, NaN above all: a maximum of them keeps a NaN.
HAL_INLINE VI abs_bits(VF v) {
  const __m256i most = _mm256_set1_epi32(0x7fffffff);
  return {_mm256_and_si256(_mm256_castps_si256(v.lo), most), _mm256_and_si256(_mm256_castps_si256(v.hi), most)};
}
HAL_INLINE VI imax(VI a, VI b) { return {_mm256_max_epi32(a.lo, b.lo), _mm256_max_epi32(a.hi, b.hi)}; }
HAL_INLINE int32_t himax(VI v) {
  const __m256i a = _mm256_max_epi32(v.lo, v.hi);
  __m128i b = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  b = _mm_max_epi32(b, _mm_shuffle_epi32(b, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(b, _mm_shuffle_epi32(b, 0xb1)));
}
HAL_INLINE VF vabs(VF v) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, v.lo), _mm256_andnot_ps(sign, v.hi)};
}
HAL_INLINE float hmax(VF v) {
  const __m256 a = _mm256_max_ps(v.lo, v.hi);
  __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
}
HAL_INLINE float hsum(VF v) {
  const __m256 a = _mm256_add_ps(v.lo, v.hi);
  __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}
// Sixteen 32-bit integers to 16 bits.
HAL_INLINE void store16(int16_t* p, VI v) {
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(_mm256_packs_epi32(v.lo, v.hi), 0xd8));
}
