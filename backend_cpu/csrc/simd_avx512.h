// Sixteen fp32 lanes in one AVX512 register. Included inside an anonymous namespace.
constexpr int kPrefetchWords = 16;  // cache lines ahead of the codes in use
constexpr int kMaxRows = 8;  // rows of the largest block
// Tiles beside R rows: as many sums as leave registers for the codes.
constexpr int block_tiles(int rows) { return rows == 8 ? 2 : 4; }

using VF = __m512;
using VI = __m512i;

#define HAL_INLINE static inline __attribute__((always_inline))

HAL_INLINE VF vzero() { return _mm512_setzero_ps(); }
HAL_INLINE VF vset(float v) { return _mm512_set1_ps(v); }
HAL_INLINE VF vload(const float* p) { return _mm512_loadu_ps(p); }
HAL_INLINE void vstore(float* p, VF v) { _mm512_storeu_ps(p, v); }
HAL_INLINE VF vadd(VF a, VF b) { return _mm512_add_ps(a, b); }
HAL_INLINE VF vsub(VF a, VF b) { return _mm512_sub_ps(a, b); }
HAL_INLINE VF vmul(VF a, VF b) { return _mm512_mul_ps(a, b); }
HAL_INLINE VF vdiv(VF a, VF b) { return _mm512_div_ps(a, b); }
HAL_INLINE VF vfma(VF a, VF b, VF c) { return _mm512_fmadd_ps(a, b, c); }
// A NaN in `v` survives: the instruction returns its second operand then.
HAL_INLINE VF vmin(VF limit, VF v) { return _mm512_min_ps(limit, v); }
HAL_INLINE VF vmax(VF limit, VF v) { return _mm512_max_ps(limit, v); }

HAL_INLINE VI iload(const int32_t* p) { return _mm512_loadu_si512(p); }
HAL_INLINE VI iset(int32_t v) { return _mm512_set1_epi32(v); }
HAL_INLINE VI ishr(VI v, int bits) { return _mm512_srli_epi32(v, bits); }
// (v & mask) ^ magic, read as float.
HAL_INLINE VF vcode(VI v, VI mask, VI magic) {
  return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(v, mask, magic, 0x6a));
}
HAL_INLINE VF vround(VF v) {
  return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
HAL_INLINE VF vpow2(VF n) { return _mm512_scalef_ps(_mm512_set1_ps(1.0f), n); }

HAL_INLINE VF vload_half(const void* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
}
HAL_INLINE VF vload_bf16(const void* p) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
HAL_INLINE VF vload_u8(const uint8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
HAL_INLINE void vstore_half(void* p, VF v) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
HAL_INLINE void vstore_bf16(void* p, VF v) {
  const VI bits = _mm512_castps_si512(v);
  const VI odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), iset(1));
  VI rounded = _mm512_srli_epi32(
      _mm512_add_epi32(bits, _mm512_add_epi32(odd, iset(0x7fff))), 16);
  // Adding the rounding constant to a NaN could carry it into infinity or zero.
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  rounded = _mm512_mask_mov_epi32(rounded, nan, iset(0x7fc0));
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(rounded));
}
