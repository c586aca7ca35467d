// Sixteen fp32 lanes in two AVX2 registers. Included inside an anonymous namespace.
constexpr int kPrefetchWords = 16;  // cache lines ahead of the codes in use
constexpr int kMaxRows = 4;  // rows of the largest block
// Tiles beside R rows: as many sums as leave registers for the codes.
constexpr int block_tiles(int rows) { return rows == 1 ? 2 : 1; }

struct VF {
  __m256 lo, hi;
};
struct VI {
  __m256i lo, hi;
};

#define HAL_INLINE static inline __attribute__((always_inline))

HAL_INLINE VF vzero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
HAL_INLINE VF vset(float v) { return {_mm256_set1_ps(v), _mm256_set1_ps(v)}; }
HAL_INLINE VF vload(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
HAL_INLINE void vstore(float* p, VF v) {
  _mm256_storeu_ps(p, v.lo);
  _mm256_storeu_ps(p + 8, v.hi);
}
HAL_INLINE VF vadd(VF a, VF b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
HAL_INLINE VF vsub(VF a, VF b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
HAL_INLINE VF vmul(VF a, VF b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
HAL_INLINE VF vdiv(VF a, VF b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
HAL_INLINE VF vfma(VF a, VF b, VF c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
// A NaN in `v` survives: the instruction returns its second operand then.
HAL_INLINE VF vmin(VF limit, VF v) {
  return {_mm256_min_ps(limit.lo, v.lo), _mm256_min_ps(limit.hi, v.hi)};
}
HAL_INLINE VF vmax(VF limit, VF v) {
  return {_mm256_max_ps(limit.lo, v.lo), _mm256_max_ps(limit.hi, v.hi)};
}

HAL_INLINE VI iload(const int32_t* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 8))};
}
HAL_INLINE VI iset(int32_t v) { return {_mm256_set1_epi32(v), _mm256_set1_epi32(v)}; }
HAL_INLINE VI ishr(VI v, int bits) {
  return {_mm256_srli_epi32(v.lo, bits), _mm256_srli_epi32(v.hi, bits)};
}
// (v & mask) ^ magic, read as float.
HAL_INLINE VF vcode(VI v, VI mask, VI magic) {
  return {_mm256_castsi256_ps(_mm256_xor_si256(_mm256_and_si256(v.lo, mask.lo), magic.lo)),
          _mm256_castsi256_ps(_mm256_xor_si256(_mm256_and_si256(v.hi, mask.hi), magic.hi))};
}
HAL_INLINE VF vround(VF v) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(v.lo, mode), _mm256_round_ps(v.hi, mode)};
}
HAL_INLINE __m256 pow2_part(__m256i n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
HAL_INLINE __m256 pow2_half(__m256 v) {
  // In two factors, since 2^128 and subnormal powers have no exponent field of their own.
  const __m256i n = _mm256_cvtps_epi32(v);
  const __m256i first = _mm256_srai_epi32(n, 1);
  return _mm256_mul_ps(pow2_part(first), pow2_part(_mm256_sub_epi32(n, first)));
}
HAL_INLINE VF vpow2(VF n) { return {pow2_half(n.lo), pow2_half(n.hi)}; }

HAL_INLINE VF vload_half(const void* p) {
  const __m128i* q = (const __m128i*)p;
  return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}
HAL_INLINE __m256 widen_bf16(__m128i v) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16));
}
HAL_INLINE VF vload_bf16(const void* p) {
  const __m128i* q = (const __m128i*)p;
  return {widen_bf16(_mm_loadu_si128(q)), widen_bf16(_mm_loadu_si128(q + 1))};
}
HAL_INLINE VF vload_u8(const uint8_t* p) {
  const __m128i v = _mm_loadu_si128((const __m128i*)p);
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(v)),
          _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(v, 8)))};
}
HAL_INLINE void vstore_half(void* p, VF v) {
  __m128i* q = (__m128i*)p;
  _mm_storeu_si128(q, _mm256_cvtps_ph(v.lo, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(q + 1, _mm256_cvtps_ph(v.hi, _MM_FROUND_TO_NEAREST_INT));
}
HAL_INLINE __m256i round_bf16(__m256 v) {
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(
      _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  // Adding the rounding constant to a NaN could carry it into infinity or zero.
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
}
HAL_INLINE void vstore_bf16(void* p, VF v) {
  const __m256i packed = _mm256_packus_epi32(round_bf16(v.lo), round_bf16(v.hi));
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(packed, 0xd8));
}
