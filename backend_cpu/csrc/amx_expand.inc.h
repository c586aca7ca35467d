// Weights as matrix tiles: one tile is [16][64] bytes, in which row r holds what 16 outputs have at
// the r-th run of four k (bytes) or two (bf16). Included inside an anonymous namespace, after
// dot_block.inc.h's table, and epilogue.inc.h.
//
// Each expansion writes `bytes`, zero where its words end before.

constexpr int64_t kTileBytes = 1024;

// Codes of four bits without zero point are multiplied as they lie, in the upper half of a byte.
HAL_INLINE bool in_upper_bits(const Matrix& m, const Records& f) {
  return m.bits == 4 && m.zero == kZeroNone && (f.operand == kInt8Token || f.operand == kInt8Group);
}

static void fill_rest(char* to, int64_t done, int64_t bytes) {
  for (; done < bytes; done += 64) _mm512_store_si512(to + done, _mm512_setzero_si512());
}

// Bytes of 4-bit codes: two rows for each word, each minus `less`.
static void expand_nibbles(const int32_t* code, int64_t words, VI less, char* to) {
  const VI low = iset(0x0f0f0f0f);
  for (int64_t i = 0; i < words; ++i) {
    const VI word = iload(code + i * kTile);
    _mm512_store_si512(to + i * 128, _mm512_sub_epi8(_mm512_and_si512(word, low), less));
    _mm512_store_si512(to + i * 128 + 64,
                       _mm512_sub_epi8(_mm512_and_si512(ishr(word, 4), low), less));
  }
}

// Bytes that are 16 times 4-bit codes in two's complement.
static void expand_upper(const int32_t* code, int64_t words, char* to) {
  const VI high = iset((int32_t)0xf0f0f0f0u);
  for (int64_t i = 0; i < words; ++i) {
    const VI word = iload(code + i * kTile);
    _mm512_store_si512(to + i * 128, _mm512_and_si512(_mm512_slli_epi32(word, 4), high));
    _mm512_store_si512(to + i * 128 + 64, _mm512_and_si512(word, high));
  }
}

// A block of one tile of outputs at group g as bytes. What may be signed is signed.
static void expand_bytes(const Matrix& m, int64_t tile, int64_t g, int64_t word, int64_t words,
                         int64_t bytes, char* to) {
  const int32_t* code = m.codes + (tile * m.words + word) * kTile;
  if (m.bits == 8) {
    for (int64_t i = 0; i < words; ++i) _mm512_store_si512(to + i * 64, iload(code + i * kTile));
    fill_rest(to, words * 64, bytes);
    return;
  }
  VI less = _mm512_setzero_si512();
  if (m.zero == kZeroInteger) {
    const VI zero = _mm512_cvtepu8_epi32(
        _mm_loadu_si128((const __m128i*)(m.zeros + (tile * m.groups + g) * kTile)));
    less = _mm512_mullo_epi32(zero, iset(0x01010101));
  }
  if (m.zero == kZeroNone) expand_upper(code, words, to);
  else expand_nibbles(code, words, less, to);
  fill_rest(to, words * 128, bytes);
}

// The scale of a whole row of int8 weights that hold the row's int4 groups: the largest code, 8,
// of the largest scale becomes 127.
static VF folded_scale(const Matrix& m, int64_t tile) {
  VF most = vzero();
  for (int64_t g = 0; g < m.groups; ++g)
    most = vmax(most, _mm512_abs_ps(load_kind(m.scales, m.scale_kind, (tile * m.groups + g) * kTile)));
  return vmul(most, vset(8.0f / 127.0f));
}

// round(code * scale / folded) of 4-bit codes without zero points. The quotient of the scales is
// held in steps of 2^-11, at most 127/8 of them; the codes in steps of 2^-4: the product of two
// 16-bit numbers that is rounded to its upper bits is the wanted byte, and never beyond 127.
static void expand_folded(const Matrix& m, int64_t tile, VF folded, int64_t word, int64_t words,
                          int64_t bytes, char* to) {
  const int32_t* code = m.codes + (tile * m.words + word) * kTile;
  const int64_t group_words = m.groups == 1 ? m.words : m.group / 8;
  const VI high = _mm512_set1_epi16((short)0xfff0), byte = _mm512_set1_epi16(0x00ff);
  const __mmask16 some = _mm512_cmp_ps_mask(folded, vzero(), _CMP_GT_OQ);
  for (int64_t i = 0; i < words;) {
    const int64_t g = (word + i) / group_words;
    const int64_t end = (g + 1) * group_words - word < words ? (g + 1) * group_words - word : words;
    const VF scale = load_kind(m.scales, m.scale_kind, (tile * m.groups + g) * kTile);
    const VF ratio = _mm512_maskz_div_ps(some, vmul(scale, vset(2048.0f)), folded);
    VI step = _mm512_cvtps_epi32(ratio);
    step = _mm512_or_si512(_mm512_and_si512(step, iset(0xffff)), _mm512_slli_epi32(step, 16));
    for (; i < end; ++i) {
      const VI w = iload(code + i * kTile);
      // In each half of a word the codes of k, k+4, k+1, k+5, from the low end.
      const auto whole = [&](VI v) {
        return _mm512_mulhrs_epi16(_mm512_and_si512(_mm512_srai_epi16(v, 8), high), step);
      };
      const VI a0 = whole(_mm512_slli_epi16(w, 12)), b0 = whole(_mm512_slli_epi16(w, 8));
      const VI a1 = whole(_mm512_slli_epi16(w, 4)), b1 = whole(w);
      const auto joined = [&](VI even, VI odd) {
        return _mm512_or_si512(_mm512_and_si512(even, byte), _mm512_slli_epi16(odd, 8));
      };
      _mm512_store_si512(to + i * 128, joined(a0, a1));
      _mm512_store_si512(to + i * 128 + 64, joined(b0, b1));
    }
  }
  fill_rest(to, words * 128, bytes);
}

// bf16 of codes around their middle; pairs of k in the order that encode_bf16 gives.
static void expand_bf16(const Matrix& m, int64_t tile, int64_t word, int64_t words, int64_t bytes,
                        char* to) {
  const int32_t* code = m.codes + (tile * m.words + word) * kTile;
  if (m.bits == 4) {
    const VI table = dot_table(m.zero);
    for (int64_t i = 0; i < words; ++i) {
      const VI w = iload(code + i * kTile);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j)
        _mm512_store_si512(to + i * 256 + j * 64,
                           _mm512_permutexvar_epi16(j ? _mm512_srli_epi16(w, 4 * j) : w, table));
    }
    fill_rest(to, words * 256, bytes);
    return;
  }
  const VI flip = m.zero == kZeroNone ? _mm512_setzero_si512() : iset((int32_t)0x80808080u);
  const auto bits = [](VI v) { return _mm512_castps_si512(_mm512_cvtepi32_ps(v)); };
  for (int64_t i = 0; i < words; ++i) {
    const VI w = _mm512_xor_si512(iload(code + i * kTile), flip);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const VI v = half ? w : _mm512_slli_epi32(w, 16);
      const VI first = bits(_mm512_srai_epi32(_mm512_slli_epi32(v, 8), 24));
      const VI second = bits(_mm512_srai_epi32(v, 24));
      _mm512_store_si512(
          to + i * 128 + half * 64,
          _mm512_or_si512(ishr(first, 16), _mm512_and_si512(second, iset((int32_t)0xffff0000u))));
    }
  }
  fill_rest(to, words * 128, bytes);
}

static void expand(const Matrix& m, const Records& f, int64_t tile, int64_t g, VF folded,
                   int64_t word, int64_t words, int64_t bytes, char* to) {
  if (f.operand == kBf16) expand_bf16(m, tile, word, words, bytes, to);
  else if (f.operand == kInt8Rescaled) expand_folded(m, tile, folded, word, words, bytes, to);
  else expand_bytes(m, tile, g, word, words, bytes, to);
}
