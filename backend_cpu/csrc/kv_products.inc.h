// Scores of one block of keys and weighted sums of one block of values, for every kind of code and
// 1 to 4 queries, with tables to pick them at run time. Included inside an anonymous namespace,
// after kv_run.inc.h.
constexpr int kRows = 4;  // queries that share one pass over the codes

HAL_INLINE Table table_of(const KvSide& side) {
  alignas(64) static constexpr int16_t kNone[32] = {};
  return load_table(side.table ? side.table : kNone);
}

template <int KIND>
HAL_INLINE int64_t key_steps(const KvSide& k) {
  return k.dim / 2 / kPairs<KIND>;
}

template <int KIND, int R, int N>
HAL_INLINE void key_tiles(const KvSide& k, const uint8_t* const* tiles, const uint8_t* const* ahead, const Table& table,
                          const void* q, int64_t stride, const float* unit, const float* bias,
                          float* s) {
  Words from[N];
  for (int n = 0; n < N; ++n) from[n] = key_words<KIND>(k, tiles[n], ahead[n]);
  if constexpr (KIND >= kKvFirstFloat) {
    VF sum[R][N];
    for (int r = 0; r < R; ++r)
      for (int n = 0; n < N; ++n) sum[r][n] = vzero();
    fma_run<KIND, R, N>(from, key_steps<KIND>(k), (const float*)q, stride, sum);
    for (int r = 0; r < R; ++r)
      for (int n = 0; n < N; ++n) vstore(s + r * kKvBlock + n * kKvTile, sum[r][n]);
  } else {
    VI sum[R][N];
    for (int r = 0; r < R; ++r)
      for (int n = 0; n < N; ++n) sum[r][n] = izero();
    dot_run<KIND, R, N>(from, key_steps<KIND>(k), table, (const int32_t*)q, stride, sum);
    for (int r = 0; r < R; ++r)
      for (int n = 0; n < N; ++n)
        vstore(s + r * kKvBlock + n * kKvTile, vfma(to_float(sum[r][n]), vset(unit[r]), vset(bias[r])));
  }
}

// s[r][token] of `count` tiles. q: pairs of 16 bits, or fp32 for float codes, which take no unit
// and no bias.
template <int KIND, int R>
static void key_scores(const KvSide& k, const uint8_t* const* tiles, const uint8_t* const* ahead,
                       int64_t count, const void* q, int64_t stride, const float* unit,
                       const float* bias, float* s) {
  const Table table = table_of(k);
  int64_t t = 0;
  if constexpr (kTilesAtOnce > 1)
    for (; t + kTilesAtOnce <= count; t += kTilesAtOnce)
      key_tiles<KIND, R, kTilesAtOnce>(k, tiles + t, ahead + t, table, q, stride, unit, bias, s + t * kKvTile);
  for (; t < count; ++t)
    key_tiles<KIND, R, 1>(k, tiles + t, ahead + t, table, q, stride, unit, bias, s + t * kKvTile);
}

template <int KIND, int R, int N>
HAL_INLINE void value_groups(const KvSide& v, const uint8_t* const* tiles, const uint8_t* const* ahead,
                             int64_t count, int64_t g, const Table& table, const void* p,
                             const float* unit, float* out) {
  constexpr int64_t steps = 8 / kPairs<KIND>;
  if constexpr (KIND >= kKvFirstFloat) {
    VF sum[R][N];
    for (int r = 0; r < R; ++r)
      for (int n = 0; n < N; ++n) sum[r][n] = vzero();
    for (int64_t t = 0; t < count; ++t) {
      Words from[N];
      for (int n = 0; n < N; ++n) from[n] = value_words<KIND>(v, tiles[t], ahead[t], g + n);
      fma_run<KIND, R, N>(from, steps, (const float*)p + t * kKvTile, kKvBlock, sum);
    }
    for (int r = 0; r < R; ++r)
      for (int n = 0; n < N; ++n) vstore(out + r * kKvMaxDim + (g + n) * 16, sum[r][n]);
  } else {
    VI sum[R][N];
    for (int r = 0; r < R; ++r)
      for (int n = 0; n < N; ++n) sum[r][n] = izero();
    for (int64_t t = 0; t < count; ++t) {
      Words from[N];
      for (int n = 0; n < N; ++n) from[n] = value_words<KIND>(v, tiles[t], ahead[t], g + n);
      dot_run<KIND, R, N>(from, steps, table, (const int32_t*)p + t * 8, kKvBlock / 2, sum);
    }
    for (int r = 0; r < R; ++r)
      for (int n = 0; n < N; ++n)
        vstore(out + r * kKvMaxDim + (g + n) * 16, vmul(to_float(sum[r][n]), vset(unit[r])));
  }
}

// out[r][channel], rows of kKvMaxDim. p: [R][kKvBlock] fp32, or as pairs of 16 bits.
template <int KIND, int R>
static void value_sums(const KvSide& v, const uint8_t* const* tiles, const uint8_t* const* ahead,
                       int64_t count, const void* p, const float* unit, float* out) {
  const Table table = table_of(v);
  const int64_t groups = v.dim / 16;
  int64_t g = 0;
  if constexpr (kGroupsAtOnce > 1)
    for (; g + kGroupsAtOnce <= groups; g += kGroupsAtOnce)
      value_groups<KIND, R, kGroupsAtOnce>(v, tiles, ahead, count, g, table, p, unit, out);
  for (; g < groups; ++g) value_groups<KIND, R, 1>(v, tiles, ahead, count, g, table, p, unit, out);
}

template <bool EXACT>
HAL_INLINE Table decoding_table(const KvSide& side) {
  alignas(64) static constexpr int16_t kSame[32] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15,
                                                    0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  // A 3-bit index has fields of others above it, which 8 and 16 must not tell apart.
  alignas(64) static constexpr int16_t kSame8[32] = {0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7,
                                                     0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7};
  alignas(64) static constexpr int16_t kSame4[32] = {0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3,
                                                     0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3};
  if (!EXACT) return table_of(side);
  return load_table(side.kind == kKvTable2 ? kSame4 : side.kind == kKvTable3 ? kSame8 : kSame);
}

template <int KIND>
HAL_INLINE Book book_of(const KvSide& side) {
  constexpr int count = KIND == kKvTable2 ? 4 : KIND == kKvTable3 ? 8 : KIND == kKvTable4 ? 16 : 0;
  float line[16] = {};
  for (int i = 0; i < count; ++i) line[i] = side.codebook[i];
  return load_book(line);
}

// Codes of a tile as kKvInt16 or kKvFp32 words in the same order.
template <int KIND, bool EXACT>
static void decode_keys(const KvSide& k, const uint8_t* tile, const uint8_t* ahead, int32_t* out) {
  decode_run<KIND, EXACT>(key_words<KIND>(k, tile, ahead), key_steps<KIND>(k), decoding_table<EXACT>(k),
                          book_of<KIND>(k), out);
}
template <int KIND, bool EXACT>
static void decode_values(const KvSide& v, const uint8_t* tile, const uint8_t* ahead, int32_t* out) {
  const Table table = decoding_table<EXACT>(v);
  const Book book = book_of<KIND>(v);
  constexpr int64_t step = 8 * (KIND >= kKvFirstFloat || EXACT ? 2 : 1) * kLine;
  for (int64_t g = 0; g < v.dim / 16; ++g)
    decode_run<KIND, EXACT>(value_words<KIND>(v, tile, ahead, g), 8 / kPairs<KIND>, table, book, out + g * step);
}

using Tiles = const uint8_t* const*;
using KeyScores = void (*)(const KvSide&, Tiles, Tiles, int64_t, const void*, int64_t, const float*,
                           const float*, float*);
using ValueSums = void (*)(const KvSide&, Tiles, Tiles, int64_t, const void*, const float*, float*);
using Decode = void (*)(const KvSide&, const uint8_t*, const uint8_t*, int32_t*);

struct Products {
  KeyScores keys[kRows];
  ValueSums values[kRows];
  Decode keys_decoded[2], values_decoded[2];  // by KvSide::exact
};

#define HAL_KV_PRODUCTS(K)                                                          \
  {                                                                                 \
    {key_scores<K, 1>, key_scores<K, 2>, key_scores<K, 3>, key_scores<K, 4>},       \
        {value_sums<K, 1>, value_sums<K, 2>, value_sums<K, 3>, value_sums<K, 4>},   \
        {decode_keys<K, false>, decode_keys<K, true>},                              \
        {decode_values<K, false>, decode_values<K, true>}                           \
  }

// By KvKind.
static constexpr Products kProducts[] = {
    HAL_KV_PRODUCTS(kKvInt8),   HAL_KV_PRODUCTS(kKvInt4),   HAL_KV_PRODUCTS(kKvTable2),
    HAL_KV_PRODUCTS(kKvTable3), HAL_KV_PRODUCTS(kKvTable4), HAL_KV_PRODUCTS(kKvInt16),
    HAL_KV_PRODUCTS(kKvBf16),   HAL_KV_PRODUCTS(kKvFp16),   HAL_KV_PRODUCTS(kKvFp8),
    HAL_KV_PRODUCTS(kKvFp32),
};
