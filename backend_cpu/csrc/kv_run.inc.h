// Products of packed codes with operands: one run of words for R operand rows and N tiles (K) or
// groups of channels (V) side by side, so that a code is decoded once for all rows. Included
// inside an anonymous namespace, after kv_simd_*.h.

template <int KIND>
constexpr int kPairs = KIND == kKvInt8 || KIND == kKvFp8                               ? 2
                       : KIND == kKvInt4 || KIND == kKvTable4                          ? 4
                       : KIND == kKvTable2 || KIND == kKvTable3                        ? 8
                                                                                       : 1;
// Word lines that one step reads.
template <int KIND>
constexpr int kLines = KIND == kKvFp32 ? 2 : 1;
constexpr int64_t kLine = 16;  // 32-bit lanes

// Where the words of one tile or group begin. `high` and `phase` are the plane of third bits, with
// `full` lines before one that may be half as long.
// `ahead`: the same words of the next block. Pages lie anywhere, so that the processor cannot guess.
struct Words {
  const int32_t* low;
  const int32_t* high;
  const int32_t* ahead;
  int64_t phase, full;
};

HAL_INLINE void prefetch(const int32_t* p) { __builtin_prefetch(p, 0, 2); }

// The words of tile `tile` of K, and of channels 16g to 16g + 15 of a tile of V.
template <int KIND>
HAL_INLINE Words key_words(const KvSide& k, const uint8_t* tile, const uint8_t* ahead) {
  const int32_t* p = (const int32_t*)tile;
  return {p, KIND == kKvTable3 ? p + k.dim / 16 * kLine : p, (const int32_t*)ahead, 0, k.dim / 32};
}
template <int KIND>
HAL_INLINE Words value_words(const KvSide& v, const uint8_t* tile, const uint8_t* ahead, int64_t g) {
  const int32_t *p = (const int32_t*)tile, *next = (const int32_t*)ahead;
  constexpr int64_t step = 8 / kPairs<KIND> * kLines<KIND> * kLine;
  if (KIND == kKvTable3)
    return {p + g * step, p + (v.dim / 16 + g / 2) * kLine, next + g * step, g & 1, v.dim / 32 - g / 2};
  return {p + g * step, p, next + g * step, 0, 0};
}

template <int KIND, int I>
HAL_INLINE VI decode(VI word, VI high, const Table& table) {
  if constexpr (KIND == kKvInt8) {
    return I == 0 ? sar16<8>(shl16<8>(word)) : sar16<8>(word);
  } else if constexpr (KIND == kKvInt4) {
    return I == 3 ? shr16<12>(word) : iand(shr16<4 * I>(word), iset(0x000f000f));
  } else if constexpr (KIND == kKvTable4) {
    return lookup16<4>(table, shr16<4 * I>(word));
  } else if constexpr (KIND == kKvTable2) {
    return lookup16<2>(table, shr16<2 * I>(word));
  } else if constexpr (KIND == kKvTable3) {
    const VI third = I < 2 ? shl16<I < 2 ? 2 - I : 0>(high) : shr16<I < 2 ? 0 : I - 2>(high);
    return lookup16<3>(table, join3(shr16<2 * I>(word), third));
  } else {
    return word;
  }
}

template <int KIND, int R, int N, int I = 0>
HAL_INLINE void dot_fields(const VI (&word)[N], const VI (&high)[N], const Table& table,
                           const int32_t* operand, int64_t stride, VI (&sum)[R][N]) {
  if constexpr (I < kPairs<KIND>) {
    VI code[N];
    for (int n = 0; n < N; ++n) code[n] = decode<KIND, I>(word[n], high[n], table);
    for (int r = 0; r < R; ++r) {
      const VI x = iset(operand[r * stride + I]);
      for (int n = 0; n < N; ++n) sum[r][n] = dot_pairs(sum[r][n], code[n], x);
    }
    dot_fields<KIND, R, N, I + 1>(word, high, table, operand, stride, sum);
  }
}

template <int KIND>
HAL_INLINE VI third_plane(const Words& from, int64_t w) {
  if constexpr (KIND == kKvTable3) {
    const int64_t line = (w + from.phase) / 2;
    if (line >= from.full) return iload_narrow(from.high + line * kLine);
    return low_byte_shift(iload(from.high + line * kLine), (w + from.phase) & 1);
  } else {
    return izero();
  }
}

// sum[r][n] += the products of `words` words with operand[r * stride ...], a pair an entry.
template <int KIND, int R, int N>
HAL_INLINE void dot_run(const Words (&from)[N], int64_t words, const Table& table,
                        const int32_t* operand, int64_t stride, VI (&sum)[R][N]) {
  for (int64_t w = 0; w < words; ++w) {
    VI word[N], high[N];
    for (int n = 0; n < N; ++n) {
      prefetch(from[n].ahead + w * kLine);
      word[n] = iload(from[n].low + w * kLine);
      high[n] = third_plane<KIND>(from[n], w);
    }
    dot_fields<KIND, R, N>(word, high, table, operand + w * kPairs<KIND>, stride, sum);
  }
}

// A pair of fp32 out of float codes; fp8 gives 2^-8 times the value.
template <int KIND, int I>
HAL_INLINE void widen(const int32_t* line, VF* even, VF* odd) {
  if constexpr (KIND == kKvFp32) {
    *even = vload((const float*)line);
    *odd = vload((const float*)line + kLine);
  } else if constexpr (KIND == kKvBf16) {
    widen_bf16_pair(iload(line), even, odd);
  } else if constexpr (KIND == kKvFp16) {
    widen_half_pair(iload(line), even, odd);
  } else {
    widen_half_pair(half_of_fp8(I == 0 ? shl16<8>(iload(line)) : iload(line)), even, odd);
  }
}

template <int KIND, int R, int N, int I = 0>
HAL_INLINE void fma_fields(const int32_t* const (&line)[N], const float* operand, int64_t stride,
                           VF (&sum)[R][N]) {
  if constexpr (I < kPairs<KIND>) {
    VF even[N], odd[N];
    for (int n = 0; n < N; ++n) widen<KIND, I>(line[n], &even[n], &odd[n]);
    for (int r = 0; r < R; ++r) {
      const VF x = vset(operand[r * stride + 2 * I]);
      for (int n = 0; n < N; ++n) sum[r][n] = vfma(even[n], x, sum[r][n]);
    }
    for (int r = 0; r < R; ++r) {
      const VF x = vset(operand[r * stride + 2 * I + 1]);
      for (int n = 0; n < N; ++n) sum[r][n] = vfma(odd[n], x, sum[r][n]);
    }
    fma_fields<KIND, R, N, I + 1>(line, operand, stride, sum);
  }
}

// The same for float codes; operand[r * stride ...] is fp32, one a depth.
template <int KIND, int R, int N>
HAL_INLINE void fma_run(const Words (&from)[N], int64_t words, const float* operand, int64_t stride,
                        VF (&sum)[R][N]) {
  for (int64_t w = 0; w < words; ++w) {
    const int32_t* line[N];
    for (int n = 0; n < N; ++n) {
      line[n] = from[n].low + w * kLines<KIND> * kLine;
      for (int l = 0; l < kLines<KIND>; ++l) prefetch(from[n].ahead + (w * kLines<KIND> + l) * kLine);
    }
    fma_fields<KIND, R, N>(line, operand + w * 2 * kPairs<KIND>, stride, sum);
  }
}

// Decodes a run: 16-bit pairs, a line each, or two lines of fp32. EXACT: codes too become fp32, by
// `book` where they are indices (then `table` leaves them as they are).
template <int KIND, bool EXACT, int I = 0>
HAL_INLINE void decode_fields(const int32_t* line, VI high, const Table& table, const Book& book,
                              int32_t* out) {
  if constexpr (I < kPairs<KIND>) {
    if constexpr (KIND >= kKvFirstFloat || EXACT) {
      VF even, odd;
      if constexpr (KIND >= kKvFirstFloat) widen<KIND, I>(line, &even, &odd);
      else if constexpr (KIND >= kKvTable2 && KIND <= kKvTable4)
        lookup_pair(book, decode<KIND, I>(iload(line), high, table), &even, &odd);
      else widen_int_pair(decode<KIND, I>(iload(line), high, table), &even, &odd);
      vstore((float*)out + 2 * I * kLine, even);
      vstore((float*)out + (2 * I + 1) * kLine, odd);
    } else {
      istore(out + I * kLine, decode<KIND, I>(iload(line), high, table));
    }
    decode_fields<KIND, EXACT, I + 1>(line, high, table, book, out);
  }
}

template <int KIND, bool EXACT>
HAL_INLINE void decode_run(const Words& from, int64_t words, const Table& table, const Book& book,
                           int32_t* out) {
  constexpr int64_t step = kPairs<KIND> * (KIND >= kKvFirstFloat || EXACT ? 2 : 1) * kLine;
  for (int64_t w = 0; w < words; ++w) {
    const int64_t at = w * kLines<KIND> * kLine;
    for (int l = 0; l < kLines<KIND>; ++l) prefetch(from.ahead + at + l * kLine);
    decode_fields<KIND, EXACT>(from.low + at, third_plane<KIND>(from, w), table, book, out + w * step);
  }
}
