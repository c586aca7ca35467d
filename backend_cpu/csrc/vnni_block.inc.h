// The inner product of int8 records with 4- and 8-bit codes, through the byte dot product: one
// instruction multiplies 64 weights. Included inside an anonymous namespace, after encode.inc.h.
//
// The instruction multiplies unsigned by signed bytes. Codes are the unsigned ones, with the sign
// bit of signed codes flipped; what that or a zero point adds is a multiple of the sum of the
// activations' codes, which the record has. A block's sum is an exact integer, whichever kernel
// makes it; then each output goes through the same two roundings a block in every variant:
// (sum * activation scale), fused with the weight scale onto the total. Where a row has one activation
// scale, the total is multiplied with it in the end instead.

HAL_INLINE VI dword(const char* p) {
  int32_t v;
  __builtin_memcpy(&v, p, 4);
  return _mm512_set1_epi32(v);
}

// The products of one word of C tiles with R rows.
template <int BITS, ZeroKind ZERO, int R, int C>
HAL_INLINE void add_word(const int32_t* const* code, int64_t i, int64_t words, const char* rows,
                         int64_t stride, VI (*part)[C]) {
  constexpr int kPerWord = 32 / BITS;
  const VI low = iset(0x0f0f0f0f);
  const VI flip = iset(BITS == 4 ? 0x08080808 : (int32_t)0x80808080u);
  VI word[C];
#pragma GCC unroll 8
  for (int c = 0; c < C; ++c) {
    word[c] = iload(code[c] + i * kTile);
    if (R <= 4) prefetch_words(code[c], i + kPrefetchWords, words, C);
  }
#pragma GCC unroll 2
  for (int half = 0; half < kPerWord / 4; ++half) {
    VI q[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      const VI bits = half ? ishr(word[c], 4) : word[c];
      if (BITS == 8) q[c] = ZERO == kZeroNone ? _mm512_xor_si512(bits, flip) : bits;
      else if (ZERO == kZeroNone) q[c] = _mm512_ternarylogic_epi32(bits, low, flip, 0x6a);
      else q[c] = _mm512_and_si512(bits, low);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const VI x = dword(rows + r * stride + i * kPerWord + half * 4);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) part[r][c] = _mm512_dpbusd_epi32(part[r][c], q[c], x);
    }
  }
}

// The words of one tile follow each other in memory, and so do the tiles: few rows take kStreams
// tiles at a time, as that many streams for the prefetcher, and sum U words apart, since each product
// must wait for the last.
template <int BITS, ZeroKind ZERO, int R, int C, int U>
static __attribute__((noinline)) void vnni_block(const Matrix& m, const Records& f, int64_t tile,
                                                 const char* rows, float* out, int64_t step) {
  constexpr int kPerWord = 32 / BITS;
  const int64_t words = m.words;
  const int64_t group_words = m.groups == 1 ? words : m.group / kPerWord;
  const int64_t block_words = f.block >= m.group ? group_words : f.block / kPerWord;
  const int32_t* code[C];
#pragma GCC unroll 8
  for (int c = 0; c < C; ++c) code[c] = m.codes + (tile + c) * words * kTile;
  VF total[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) total[r][c] = vzero();

  const bool token = f.operand == kInt8Token;
  int64_t block = 0;
  for (int64_t g = 0; g < m.groups; ++g) {
    const int64_t first = g * group_words;
    const int64_t last = first + group_words < words ? first + group_words : words;
    for (int64_t begin = first; begin < last; begin += block_words, ++block) {
      const int64_t end = begin + block_words < last ? begin + block_words : last;
      VI part[R][C], more[U][R][C];
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        VI zero = _mm512_setzero_si512();
        if (ZERO == kZeroInteger)
          zero = _mm512_cvtepu8_epi32(_mm_loadu_si128(
              (const __m128i*)(m.zeros + ((tile + c) * m.groups + g) * kTile)));
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const VI sum = dword(rows + r * f.stride + f.sums_at + block * 4);
          part[r][c] = ZERO == kZeroNone      ? sum
                       : ZERO == kZeroInteger ? _mm512_mullo_epi32(zero, sum)
                                              : _mm512_setzero_si512();
        }
      }
#pragma GCC unroll 8
      for (int u = 1; u < U; ++u)
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
          for (int c = 0; c < C; ++c) more[u][r][c] = _mm512_setzero_si512();
      int64_t i = begin;
      for (; i + U <= end; i += U)
#pragma GCC unroll 8
        for (int u = 0; u < U; ++u)
          add_word<BITS, ZERO, R, C>(code, i + u, words, rows, f.stride, u ? more[u] : part);
      for (; i < end; ++i) add_word<BITS, ZERO, R, C>(code, i, words, rows, f.stride, part);
#pragma GCC unroll 8
      for (int u = 1; u < U; ++u)
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
          for (int c = 0; c < C; ++c) part[r][c] = _mm512_add_epi32(part[r][c], more[u][r][c]);
      VF scale[C], least[C];
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        const int64_t at = ((tile + c) * m.groups + g) * kTile;
        scale[c] = load_kind(m.scales, m.scale_kind, at);
        if (ZERO == kZeroMinimum) least[c] = load_kind(m.mins, m.min_kind, at);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const char* record = rows + r * f.stride;
        const VF own = token ? vset(1.0f)
                             : _mm512_castsi512_ps(dword(record + f.scales_at + block * 4));
        VF sum = vzero();
        if (ZERO == kZeroMinimum)
          sum = vmul(_mm512_cvtepi32_ps(dword(record + f.sums_at + block * 4)), own);
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
          const VF value = vmul(_mm512_cvtepi32_ps(part[r][c]), own);
          total[r][c] = vfma(value, scale[c], total[r][c]);
          if (ZERO == kZeroMinimum) total[r][c] = vfma(sum, least[c], total[r][c]);
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const VF own =
        token ? _mm512_castsi512_ps(dword(rows + r * f.stride + f.scales_at)) : vset(1.0f);
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) vstore(out + r * step + c * kTile, vmul(total[r][c], own));
  }
}

template <int R, int C, int U>
static void vnni_any(const Matrix& m, const Records& f, int64_t tile, const char* rows, float* out,
                     int64_t step) {
  if (m.bits == 4) {
    if (m.zero == kZeroNone) return vnni_block<4, kZeroNone, R, C, U>(m, f, tile, rows, out, step);
    if (m.zero == kZeroInteger)
      return vnni_block<4, kZeroInteger, R, C, U>(m, f, tile, rows, out, step);
    return vnni_block<4, kZeroMinimum, R, C, U>(m, f, tile, rows, out, step);
  }
  if (m.zero == kZeroNone) return vnni_block<8, kZeroNone, R, C, U>(m, f, tile, rows, out, step);
  if (m.zero == kZeroInteger)
    return vnni_block<8, kZeroInteger, R, C, U>(m, f, tile, rows, out, step);
  return vnni_block<8, kZeroMinimum, R, C, U>(m, f, tile, rows, out, step);
}

template <int R>
static void vnni_rows(const Matrix& m, const Records& f, int64_t tile, int64_t tiles,
                      const char* rows, float* out, int64_t step) {
  // As many tiles as leave registers for the codes beside the sums; four rows are content with two
  // where fewer streams are faster.
  constexpr int C = R > 4 || (R == 4 && kStreams == 1) ? 2 : R > 2 ? 4 : kStreams;
  constexpr int U = R > 2 ? 1 : 4 / kStreams;
  int64_t c = 0;
  for (; c + C <= tiles; c += C) vnni_any<R, C, U>(m, f, tile + c, rows, out + c * kTile, step);
  if constexpr (C > 1)
    for (; c < tiles; ++c) vnni_any<R, 1, U>(m, f, tile + c, rows, out + c * kTile, step);
}

// out[r][0 .. tiles * kTile) for all rows of a band.
static void vnni_totals(const Matrix& m, const Records& f, int64_t tile, int64_t tiles,
                        const BlockRows& rows, float* out, int64_t step) {
  for (int64_t r = 0; r < rows.count;) {
    const char* at = rows.records + r * f.stride;
    float* to = out + r * step;
    const int64_t left = rows.count - r;
    if (left >= 8) vnni_rows<8>(m, f, tile, tiles, at, to, step), r += 8;
    else if (left >= 4) vnni_rows<4>(m, f, tile, tiles, at, to, step), r += 4;
    else if (left == 3) vnni_rows<3>(m, f, tile, tiles, at, to, step), r += 3;
    else if (left == 2) vnni_rows<2>(m, f, tile, tiles, at, to, step), r += 2;
    else vnni_rows<1>(m, f, tile, tiles, at, to, step), r += 1;
  }
}
