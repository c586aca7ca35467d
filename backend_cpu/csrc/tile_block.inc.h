// The inner product of up to a few rows with a few 16-column tiles. Included inside an anonymous
// namespace, after the vector header of the instruction set.
//
// A row's result must not depend on how many rows or tiles share a call, so every variant runs
// the same sequence of roundings per output: within a block of k, one fused multiply-add per k in
// code order from zero; then one with the group's scale onto the total. Variants differ only in
// how often an expanded weight is reused.
//
// A code becomes a float without a conversion or a table: masked in place and joined with an
// exponent, nibble p of a 16-bit half reads as 2^(23-bits*p) + q, and subtracting
// 2^(23-bits*p) + zero leaves q - zero exactly. Signed codes have their sign bit flipped by the
// same xor, so that their zero is 2^(bits-1).

HAL_INLINE VF load_kind(const void* base, FloatKind kind, int64_t index) {
  switch (kind) {
    case kFloat16:
      return vload_half((const uint16_t*)base + index);
    case kBFloat16:
      return vload_bf16((const uint16_t*)base + index);
    default:
      return vload((const float*)base + index);
  }
}

// Past the end of a tile, the words wanted next are those of the block after this one.
HAL_INLINE void prefetch_words(const int32_t* tile, int64_t word, int64_t words, int tiles) {
  __builtin_prefetch(tile + (word < words ? word : word + (tiles - 1) * words) * kTile);
}

template <int BITS>
constexpr int32_t code_exponent(int position) {
  return (127 + 23 - position * BITS) << 23;
}

template <int BITS, ZeroKind ZERO>
constexpr int32_t code_magic(int position) {
  const int32_t sign = ZERO == kZeroNone ? 1 << (BITS - 1 + position * BITS) : 0;
  return code_exponent<BITS>(position) ^ sign;
}

template <int BITS, ZeroKind ZERO>
constexpr float code_offset(int position) {
  // Minimums are applied around the middle code as well: q*s + min = (q-mid)*s + (min + mid*s),
  // whose two sums cancel less.
  const float middle = ZERO == kZeroInteger ? 0.0f : (float)(1 << (BITS - 1));
  return (float)(1 << (23 - position * BITS)) + middle;
}

// Which of a word's k the e-th code from the low end is (see pack.cpp).
template <int BITS>
constexpr int code_k(int e) {
  return BITS == 4 ? (e >> 1) + 4 * (e & 1) : e;
}

template <int BITS, ZeroKind ZERO, int R, int C>
static __attribute__((noinline)) void tile_block(const Matrix& m, int64_t tile,
                                                 const float* const* x, const float* const* sums,
                                                 float* out) {
  constexpr int kPerWord = 32 / BITS;
  // Positions used before the word is shifted: more save shifts and cost registers.
  constexpr int P = (BITS == 4 && ZERO != kZeroInteger && R == 1) ? 4 : 2;
  const int64_t words = m.words;
  const int64_t group_words = m.groups == 1 ? words : m.group / kPerWord;
  const int32_t* code[C];
#pragma GCC unroll 8
  for (int c = 0; c < C; ++c) code[c] = m.codes + (tile + c) * words * kTile;

  VI mask[P], magic[P];
  VF offset[P];
#pragma GCC unroll 4
  for (int p = 0; p < P; ++p) {
    mask[p] = iset(((1 << BITS) - 1) << (p * BITS));
    magic[p] = iset(code_magic<BITS, ZERO>(p));
    offset[p] = vset(code_offset<BITS, ZERO>(p));
  }

  VF total[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) total[r][c] = vzero();

  int64_t block = 0;
  for (int64_t g = 0; g < m.groups; ++g) {
    const int64_t first = g * group_words;
    const int64_t last = first + group_words < words ? first + group_words : words;
    VF zero[C][P];
    if (ZERO == kZeroInteger) {
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        const VF z = vload_u8(m.zeros + ((tile + c) * m.groups + g) * kTile);
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) zero[c][p] = vadd(z, offset[p]);
      }
    }
    for (int64_t begin = first; begin < last; begin += kBlock / kPerWord, ++block) {
      const int64_t end = begin + kBlock / kPerWord < last ? begin + kBlock / kPerWord : last;
      VF part[R][C];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) part[r][c] = vzero();

      for (int64_t i = begin; i < end; ++i) {
        VI word[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
          word[c] = iload(code[c] + i * kTile);
          prefetch_words(code[c], i + kPrefetchWords, words, C);
        }
#pragma GCC unroll 8
        for (int e = 0; e < kPerWord; ++e) {
          const int p = e % P;
          VF q[C];
#pragma GCC unroll 8
          for (int c = 0; c < C; ++c) {
            if (p == 0 && e > 0) word[c] = ishr(word[c], P * BITS);
            q[c] = vsub(vcode(word[c], mask[p], magic[p]),
                        ZERO == kZeroInteger ? zero[c][p] : offset[p]);
          }
#pragma GCC unroll 16
          for (int r = 0; r < R; ++r) {
            const VF xv = vset(x[r][i * kPerWord + code_k<BITS>(e)]);
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) part[r][c] = vfma(q[c], xv, part[r][c]);
          }
        }
      }

#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        const int64_t at = ((tile + c) * m.groups + g) * kTile;
        const VF scale = load_kind(m.scales, m.scale_kind, at);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) total[r][c] = vfma(part[r][c], scale, total[r][c]);
        if (ZERO == kZeroMinimum) {
          const VF shift = vfma(scale, vset((float)(1 << (BITS - 1))),
                                load_kind(m.mins, m.min_kind, at));
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r)
            total[r][c] = vfma(shift, vset(sums[r][block]), total[r][c]);
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) vstore(out + (r * C + c) * kTile, total[r][c]);
}

template <int R, int C>
static void any_block(const Matrix& m, int64_t tile, const float* const* x,
                      const float* const* sums, float* out) {
  const int zero = (int)m.zero;
  if (m.bits == 4) {
    if (zero == kZeroNone) return tile_block<4, kZeroNone, R, C>(m, tile, x, sums, out);
    if (zero == kZeroInteger) return tile_block<4, kZeroInteger, R, C>(m, tile, x, sums, out);
    return tile_block<4, kZeroMinimum, R, C>(m, tile, x, sums, out);
  }
  if (zero == kZeroNone) return tile_block<8, kZeroNone, R, C>(m, tile, x, sums, out);
  if (zero == kZeroInteger) return tile_block<8, kZeroInteger, R, C>(m, tile, x, sums, out);
  return tile_block<8, kZeroMinimum, R, C>(m, tile, x, sums, out);
}
