// Activations to the records of blocks.h. Included inside an anonymous namespace, after
// simd_avx512.h.

HAL_INLINE __mmask16 lanes_of(int64_t left) {
  return left >= kTile ? (__mmask16)0xffff : (__mmask16)((1u << left) - 1);
}

// The largest magnitude of x[begin..end), NaN if any of them is not finite.
static float largest(const float* x, int64_t begin, int64_t end) {
  const VF limit = vset(__builtin_inff());
  VF most = vzero();
  __mmask16 odd = 0;
  for (int64_t i = begin; i < end; i += kTile) {
    const VF v = _mm512_abs_ps(_mm512_maskz_loadu_ps(lanes_of(end - i), x + i));
    odd |= _mm512_cmp_ps_mask(v, limit, _CMP_NLT_UQ);
    most = vmax(most, v);
  }
  return odd ? __builtin_nanf("") : _mm512_reduce_max_ps(most);
}

// How a span becomes codes: x * before * inverse, and back by scale.
struct Step {
  float before, inverse, scale;
};

static Step step_of(float most) {
  // The reciprocal of a tiny step would be infinite.
  constexpr float kTiny = 1e-30f, kUp = 0x1p100f;
  if (most >= kTiny) return {1.0f, 127.0f / most, most / 127.0f};
  if (most > 0.0f) return {kUp, 127.0f / (most * kUp), most / 127.0f};
  return {0.0f, 0.0f, most};  // all zero, or not finite
}

// Codes of x[begin..end); returns their sum.
static int32_t to_codes(const float* x, const Step& step, int64_t begin, int64_t end,
                        int8_t* codes) {
  const VF before = vset(step.before), inverse = vset(step.inverse);
  VI sum = _mm512_setzero_si512();
  for (int64_t i = begin; i < end; i += kTile) {
    const __mmask16 lanes = lanes_of(end - i);
    const VF v = _mm512_maskz_loadu_ps(lanes, x + i);
    // Without a step all codes are zero: those of values that are not finite would overflow the sum.
    const __mmask16 live = step.inverse > 0.0f ? lanes : 0;
    const VI code = _mm512_maskz_cvtps_epi32(live, vmul(vmul(v, before), inverse));
    // Narrowed and stored apart: AMD's cores take a hundred cycles for both in one instruction.
    const __m128i narrow = _mm512_cvtsepi32_epi8(code);
    if (lanes == 0xffff) _mm_storeu_si128((__m128i*)(codes + i), narrow);
    else _mm_mask_storeu_epi8(codes + i, lanes, narrow);
    sum = _mm512_add_epi32(sum, code);
  }
  return _mm512_reduce_add_epi32(sum);
}

static void encode_int8(const float* x, int64_t k, const Records& f, char* record) {
  auto* codes = (int8_t*)record;
  auto* scales = (float*)(record + f.scales_at);
  auto* sums = (int32_t*)(record + f.sums_at);
  Step step = step_of(f.span ? 0.0f : largest(x, 0, k));
  for (int64_t first = 0; first < k; first += f.group) {
    const int64_t last = first + f.group < k ? first + f.group : k;
    const int64_t span = f.span && f.span < f.group ? f.span : f.group;
    for (int64_t at = first; at < last; at += span) {
      const int64_t end = at + span < last ? at + span : last;
      if (f.span) step = step_of(largest(x, at, end));
      for (int64_t begin = at; begin < end; begin += f.block) {
        const int64_t stop = begin + f.block < end ? begin + f.block : end;
        *scales++ = step.scale;
        *sums++ = f.factor * to_codes(x, step, begin, stop, codes);
      }
    }
  }
  for (int64_t i = k; i < f.padded; ++i) codes[i] = 0;
}

// A row rounded to bf16, pairs of k in the order of expand_bf16, with the sums of what was rounded.
[[maybe_unused]] static void encode_bf16(const float* x, int64_t k, const Records& f, char* record) {
  auto* values = (uint16_t*)record;
  auto* scales = (float*)(record + f.scales_at);
  auto* sums = (float*)(record + f.sums_at);
  alignas(64) uint16_t line[kTile];
  for (int64_t i = 0; i < f.padded; i += kTile) {
    vstore_bf16(line, i < k ? _mm512_maskz_loadu_ps(lanes_of(k - i), x + i) : vzero());
    const __m256i plain = _mm256_load_si256((const __m256i*)line);
    // A word of 4-bit codes gives pairs of k: 0 and 2, 4 and 6, 1 and 3, 5 and 7.
    const __m256i order = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
    _mm256_storeu_si256((__m256i*)(values + i),
                        f.factor ? _mm256_shuffle_epi8(plain, order) : plain);
  }
  for (int64_t first = 0, block = 0; first < k; first += f.group) {
    const int64_t last = first + f.group < k ? first + f.group : k;
    for (int64_t begin = first; begin < last; begin += f.block, ++block) {
      const int64_t end = begin + f.block < last ? begin + f.block : last;
      VF sum = vzero();
      for (int64_t i = begin; i < end; i += kTile) {
        vstore_bf16(line, _mm512_maskz_loadu_ps(lanes_of(end - i), x + i));
        sum = vadd(sum, vload_bf16(line));
      }
      scales[block] = 1.0f;
      sums[block] = _mm512_reduce_add_ps(sum);
    }
  }
}
