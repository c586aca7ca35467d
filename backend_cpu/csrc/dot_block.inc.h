// The inner product of tile_block.inc.h for 4-bit codes, through the bf16 dot product: one
// instruction multiplies 32 weights. Included inside an anonymous namespace.
//
// It stays exact: a code around its middle is a bf16 integer, and an activation is a sum of bf16
// planes, one for bf16 itself, two for fp16, three for fp32 (8 bits of its 24 each). Products are
// exact and sums fp32. The instruction reads subnormal operands as zero and returns none; that,
// below 1.2e-38, is the one difference to the fp32 kernels.
//
// As there, the roundings of an output are the same sequence in every variant: each plane has its
// own sum, so that a variant may interleave planes as it likes.

// Codes of 16-bit lane l at shift 4*j: k = 4*(j & 1) + (j >> 1) in the low half, two more in the
// high half (see pack.cpp).
constexpr int dot_k(int j, int half) { return 4 * (j & 1) + (j >> 1) + 2 * half; }

// Pairs of activations as the dot product takes them: [words][planes][4] uint32 behind the fp32
// row. `x` has `padded` values.
HAL_INLINE uint32_t* planes_of(float* x, int64_t k) {
  return (uint32_t*)(x + (k + kTile - 1) / kTile * kTile);
}
HAL_INLINE const uint32_t* planes_of(const float* x, int64_t k) {
  return (const uint32_t*)(x + (k + kTile - 1) / kTile * kTile);
}

[[maybe_unused]] static void split_row(float* x, int64_t k, int planes) {
  uint32_t* out = planes_of(x, k);
  const int64_t words = (k + 7) / 8;
  // One word's eight values in the order j=0 low, j=0 high, j=1 low, ...
  const __m256i order = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
  const __m256i top = _mm256_set1_epi32((int)0xffff0000u);
  for (int64_t w = 0; w < words; ++w) {
    __m256 rest = _mm256_permutevar8x32_ps(_mm256_loadu_ps(x + w * 8), order);
    // Infinity minus itself would be NaN, and a NaN whose payload is cut would be infinity.
    const __mmask8 finite = _mm256_cmp_ps_mask(
        _mm256_sub_ps(rest, rest), _mm256_setzero_ps(), _CMP_EQ_OQ);
    const __mmask8 nan = _mm256_cmp_ps_mask(rest, rest, _CMP_UNORD_Q);
    rest = _mm256_castsi256_ps(_mm256_mask_mov_epi32(
        _mm256_castps_si256(rest), nan, _mm256_set1_epi32(0x7fc00000)));
    for (int p = 0; p < planes; ++p) {
      const __m256i part = _mm256_and_si256(_mm256_castps_si256(rest), top);
      rest = _mm256_maskz_sub_ps(finite, rest, _mm256_castsi256_ps(part));
      // Eight 32-bit values to eight bf16, neighbours forming a pair.
      const __m128i pairs = _mm256_cvtepi32_epi16(_mm256_srli_epi32(part, 16));
      _mm_storeu_si128((__m128i*)(out + (w * planes + p) * 4), pairs);
    }
  }
}

HAL_INLINE __m512i dot_table(ZeroKind zero) {
  // bf16 of -8..7 for codes 0..15, and again: the shuffle looks at five bits of a lane, the fifth
  // belonging to the next code. Two's complement codes start at 0.
  const __m512i codes = _mm512_and_si512(
      _mm512_set_epi16(31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16, 15, 14, 13,
                       12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
      _mm512_set1_epi16(15));
  const __m512i middle = _mm512_set_epi16(
      0x40e0, 0x40c0, 0x40a0, 0x4080, 0x4040, 0x4000, 0x3f80, 0, (short)0xbf80, (short)0xc000,
      (short)0xc040, (short)0xc080, (short)0xc0a0, (short)0xc0c0, (short)0xc0e0, (short)0xc100,
      0x40e0, 0x40c0, 0x40a0, 0x4080, 0x4040, 0x4000, 0x3f80, 0, (short)0xbf80, (short)0xc000,
      (short)0xc040, (short)0xc080, (short)0xc0a0, (short)0xc0c0, (short)0xc0e0, (short)0xc100);
  const __m512i turn = zero == kZeroNone ? _mm512_set1_epi16(8) : _mm512_setzero_si512();
  return _mm512_permutexvar_epi16(_mm512_xor_si512(codes, turn), middle);
}

HAL_INLINE VF vdot(VF sum, __m512i q, uint32_t pair) {
  return _mm512_dpbf16_ps(sum, (__m512bh)q, (__m512bh)_mm512_set1_epi32((int)pair));
}

// What a code around its middle lacks, times the sum of the activations.
HAL_INLINE VF dot_shift(const Matrix& m, int64_t at, VF scale) {
  if (m.zero == kZeroInteger) return vmul(scale, vsub(vset(8.0f), vload_u8(m.zeros + at)));
  return vfma(scale, vset(8.0f), load_kind(m.mins, m.min_kind, at));
}

template <int PLANES, int R, int C>
static __attribute__((noinline)) void dot_block(const Matrix& m, int64_t tile,
                                                const float* const* x, const float* const* sums,
                                                float* out) {
  const int64_t words = m.words;
  const int64_t group_words = m.groups == 1 ? words : m.group / 8;
  const __m512i table = dot_table(m.zero);
  const int32_t* code[C];
#pragma GCC unroll 8
  for (int c = 0; c < C; ++c) code[c] = m.codes + (tile + c) * words * kTile;
  const uint32_t* pairs[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) pairs[r] = planes_of(x[r], m.k);

  VF total[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) total[r][c] = vzero();

  int64_t block = 0;
  for (int64_t g = 0; g < m.groups; ++g) {
    const int64_t first = g * group_words;
    const int64_t last = first + group_words < words ? first + group_words : words;
    for (int64_t begin = first; begin < last; begin += kBlock / 8, ++block) {
      const int64_t end = begin + kBlock / 8 < last ? begin + kBlock / 8 : last;
      VF part[PLANES][R][C];
#pragma GCC unroll 4
      for (int p = 0; p < PLANES; ++p)
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
          for (int c = 0; c < C; ++c) part[p][r][c] = vzero();

      for (int64_t i = begin; i < end; ++i) {
        VI word[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
          word[c] = iload(code[c] + i * kTile);
          prefetch_words(code[c], i + kPrefetchWords, words, C);
        }
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
          __m512i q[C];
#pragma GCC unroll 8
          for (int c = 0; c < C; ++c)
            q[c] = _mm512_permutexvar_epi16(
                j ? _mm512_srli_epi16(word[c], 4 * j) : word[c], table);
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int p = 0; p < PLANES; ++p)
#pragma GCC unroll 8
              for (int c = 0; c < C; ++c)
                part[p][r][c] = vdot(part[p][r][c], q[c], pairs[r][(i * PLANES + p) * 4 + j]);
        }
      }

#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        const int64_t at = ((tile + c) * m.groups + g) * kTile;
        const VF scale = load_kind(m.scales, m.scale_kind, at);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          VF sum = part[PLANES - 1][r][c];
#pragma GCC unroll 4
          for (int p = PLANES - 2; p >= 0; --p) sum = vadd(part[p][r][c], sum);
          total[r][c] = vfma(sum, scale, total[r][c]);
        }
        if (m.zero == kZeroNone) continue;
        const VF shift = dot_shift(m, at, scale);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
          total[r][c] = vfma(shift, vset(sums[r][block]), total[r][c]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) vstore(out + (r * C + c) * kTile, total[r][c]);
}

// Lines of codes ahead of those in use that dot_blocks fetches. Measured: half and twice as many are
// slower.
constexpr int64_t kLinesAhead = 80;

// What dot_block does, for one tile and B blocks of k side by side: sums of blocks no more wait for
// each other than those of tiles, and memory is read as one stream, which AMD's cores do faster.
// Blocks are `step` words apart and `words` long; their sums are added in the order of dot_block.
template <int PLANES, int R, int B>
HAL_INLINE void dot_blocks(const Matrix& m, int64_t tile, const uint32_t* const* pairs,
                           const float* const* sums, VI table, int64_t block, int64_t step,
                           int64_t words, VF* total) {
  const int32_t* code = m.codes + (tile * m.words + block * step) * kTile;
  const int64_t group_words = m.groups == 1 ? m.words : m.group / 8;
  VF part[PLANES][R][B];
#pragma GCC unroll 4
  for (int p = 0; p < PLANES; ++p)
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int b = 0; b < B; ++b) part[p][r][b] = vzero();
  for (int64_t i = 0; i < words; ++i) {
    VI word[B];
#pragma GCC unroll 8
    for (int b = 0; b < B; ++b) {
      word[b] = iload(code + (b * step + i) * kTile);
      __builtin_prefetch(code + (i * B + b + kLinesAhead) * kTile);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      VI q[B];
#pragma GCC unroll 8
      for (int b = 0; b < B; ++b)
        q[b] = _mm512_permutexvar_epi16(j ? _mm512_srli_epi16(word[b], 4 * j) : word[b], table);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int p = 0; p < PLANES; ++p)
#pragma GCC unroll 8
          for (int b = 0; b < B; ++b)
            part[p][r][b] = vdot(part[p][r][b], q[b],
                                 pairs[r][(((block + b) * step + i) * PLANES + p) * 4 + j]);
    }
  }
#pragma GCC unroll 8
  for (int b = 0; b < B; ++b) {
    const int64_t at = (tile * m.groups + (block + b) * step / group_words) * kTile;
    const VF scale = load_kind(m.scales, m.scale_kind, at);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      VF sum = part[PLANES - 1][r][b];
#pragma GCC unroll 4
      for (int p = PLANES - 2; p >= 0; --p) sum = vadd(part[p][r][b], sum);
      total[r] = vfma(sum, scale, total[r]);
    }
    if (m.zero == kZeroNone) continue;
    const VF shift = dot_shift(m, at, scale);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) total[r] = vfma(shift, vset(sums[r][block + b]), total[r]);
  }
}

template <int PLANES, int R>
static __attribute__((noinline)) void dot_tile(const Matrix& m, int64_t tile,
                                               const float* const* x, const float* const* sums,
                                               float* out) {
  const int64_t group_words = m.groups == 1 ? m.words : m.group / 8;
  const int64_t step = group_words < kBlock / 8 ? group_words : kBlock / 8;
  const int64_t whole = m.words / step, rest = m.words % step;
  const VI table = dot_table(m.zero);
  const uint32_t* pairs[R];
  VF total[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) pairs[r] = planes_of(x[r], m.k), total[r] = vzero();
  // As many blocks as leave registers for the codes beside the sums.
  constexpr int B = PLANES * R <= 4 ? 4 : 2;
  int64_t block = 0;
  for (; block + B <= whole; block += B)
    dot_blocks<PLANES, R, B>(m, tile, pairs, sums, table, block, step, step, total);
  if constexpr (B > 2)
    for (; block + 2 <= whole; block += 2)
      dot_blocks<PLANES, R, 2>(m, tile, pairs, sums, table, block, step, step, total);
  for (; block < whole; ++block)
    dot_blocks<PLANES, R, 1>(m, tile, pairs, sums, table, block, step, step, total);
  if (rest) dot_blocks<PLANES, R, 1>(m, tile, pairs, sums, table, block, step, rest, total);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) vstore(out + r * kTile, total[r]);
}

// Whether every block of k but the last is as long as the first.
static bool even_blocks(const Matrix& m) {
  return m.groups == 1 || m.group <= kBlock || m.group % kBlock == 0;
}

template <int PLANES, int R>
static int64_t dot_step(const Matrix& m, int64_t tile, int64_t left, const float* const* x,
                        const float* const* sums, float* out) {
  // More rows are bound by the dot products, which tiles side by side feed with fewer loads.
  if constexpr (R <= 3) {
    if (even_blocks(m)) {
      dot_tile<PLANES, R>(m, tile, x, sums, out);
      return 1;
    }
  }
  // As many tiles as leave registers for the codes beside the sums.
  constexpr int kFit = (PLANES == 1 ? 16 : 24) / (PLANES * R);
  constexpr int C = kFit >= 4 ? 4 : kFit >= 2 ? 2 : 1;
  if (left >= C) {
    dot_block<PLANES, R, C>(m, tile, x, sums, out);
    return C;
  }
  dot_block<PLANES, R, 1>(m, tile, x, sums, out);
  return 1;
}
