// A block of tokens: where its codes and scales lie, and the scores of a few queries with its keys.
// Included inside an anonymous namespace, after kv_products.inc.h.

constexpr float kNothing = -__builtin_inff();
constexpr float kLowest = -3.4028234663852886e38f;

// One block of tokens, where its codes and scales lie.
struct Block {
  int64_t at, tiles;
  const uint8_t* k[kKvTiles];
  const uint8_t* v[kKvTiles];
  // The same tiles of the next block, to be fetched early; of this one where there is none.
  const uint8_t* next_k[kKvTiles];
  const uint8_t* next_v[kKvTiles];
  const uint8_t* k_stored[kKvTiles];   // as in the page, also where `k` is decoded
  const uint16_t* k_scales[kKvTiles];  // per channel: of the tile's group
  // Per token; 1 and 0 where there are none.
  alignas(64) float k_scale[kKvBlock];
  alignas(64) float k_min[kKvBlock];
  alignas(64) float v_scale[kKvBlock];
  alignas(64) float v_min[kKvBlock];
};

// Memory of one call.
struct Work {
  Block block;
  alignas(64) float s[kRows * kKvBlock];
  alignas(64) int32_t p16[kRows * kKvBlock / 2];
  alignas(64) float folded[kRows * kKvMaxDim];
  alignas(64) int32_t folded16[kRows * kKvMaxDim / 2];
  alignas(64) float fresh[kRows * kKvMaxDim];
  alignas(64) float unit[kRows];
  alignas(64) float correct[kRows];
  alignas(64) float shift[kRows];  // sum of weight * minimum
  float* wide;     // two tiles of K in fp32
  float* careful;  // a tile of V in fp32
  // Decoded tiles follow: a block of K, a block of V, then those two.
};

HAL_INLINE int64_t decoded_tile(const KvSide& side) {
  return kKvTile * side.dim * (side.exact || side.kind >= kKvFirstFloat ? 4 : 2);
}

static int64_t work_bytes(const KvSide& k, const KvSide& v) {
  return (int64_t)sizeof(Work) + kKvBlock * (k.dim + v.dim) * 4 + kKvTile * (2 * k.dim + v.dim) * 4;
}

// Whether products are of fp32.
HAL_INLINE bool in_floats(const KvSide& side) { return side.exact || side.kind >= kKvFirstFloat; }
HAL_INLINE bool per_channel(const KvSide& side) {
  return side.scales == kKvChannel || side.scales == kKvChannelMin;
}

static void token_scales(const KvSide& side, const uint16_t* scales, float* scale, float* minimum) {
  if (side.scales == kKvToken || side.scales == kKvTokenMin) {
    vstore(scale, vload_half(scales));
    vstore(minimum, side.scales == kKvTokenMin ? vload_half(scales + kKvTile) : vzero());
  } else {
    vstore(scale, vset(1.0f));
    vstore(minimum, vzero());
  }
}

// Walks the tiles of a sequence, a division only where it starts.
struct Walk {
  const KvSequence& s;
  int64_t head, page, tile, tiles;
  const uint8_t* base;

  inline __attribute__((always_inline)) Walk(const KvSequence& sequence, int64_t kv_head, int64_t position)
      : s(sequence), head(kv_head), page(position / s.page_size), tile(position % s.page_size / kKvTile),
        tiles(s.page_size / kKvTile), base(s.pages + s.block_row[page] * s.page_bytes) {}
  // `more`: there is a next tile, so its page may be looked up.
  inline __attribute__((always_inline)) void step(bool more) {
    if (++tile < tiles || !more) return;
    tile = 0;
    base = s.pages + s.block_row[++page] * s.page_bytes;
  }
  inline __attribute__((always_inline)) const uint8_t* codes(const KvSide& side) const {
    return base + side.codes_at + head * side.head_bytes + tile * side.tile_bytes;
  }
  inline __attribute__((always_inline)) const uint16_t* scales(const KvSide& side) const {
    const int64_t set = per_channel(side) ? tile / 2 : tile;
    return (const uint16_t*)(base + side.scales_at + head * side.head_bytes + set * side.scales_bytes);
  }
};

HAL_INLINE void fetch_scales(const uint16_t* scales, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) prefetch((const int32_t*)((const uint8_t*)scales + i));
}

static void find_next(const KvSequence& s, const KvSide& k, const KvSide& v, int64_t end, Block& b) {
  const bool here = b.at + kKvBlock < end;
  const int64_t from = here ? b.at + kKvBlock : s.next_begin, head = here ? s.head : s.next_head;
  const int64_t left = from < 0 ? 0 : (here ? end : s.length) - from;
  const int64_t more = left <= 0 ? 0 : (left + kKvTile - 1) / kKvTile;
  const int64_t tiles = more < b.tiles ? more : b.tiles;
  if (tiles > 0) {
    Walk next(s, head, from);
    for (int64_t t = 0; t < tiles; ++t, next.step(t < tiles)) {
      b.next_k[t] = next.codes(k);
      b.next_v[t] = next.codes(v);
      if (!per_channel(k) || next.tile % 2 == 0) fetch_scales(next.scales(k), k.scales_bytes);
      fetch_scales(next.scales(v), v.scales_bytes);
    }
  }
  for (int64_t t = tiles; t < b.tiles; ++t) {
    b.next_k[t] = b.k[t];
    b.next_v[t] = b.v[t];
  }
}

static void find_block(const KvSequence& s, const KvSide& k, const KvSide& v, int64_t at,
                       int64_t tiles, int64_t end, Block& b) {
  b.at = at;
  b.tiles = tiles;
  Walk here(s, s.head, at);
  for (int64_t t = 0; t < tiles; ++t, here.step(t < tiles)) {
    b.k[t] = b.k_stored[t] = here.codes(k);
    b.v[t] = here.codes(v);
    b.k_scales[t] = here.scales(k);
    token_scales(k, b.k_scales[t], b.k_scale + t * kKvTile, b.k_min + t * kKvTile);
    token_scales(v, here.scales(v), b.v_scale + t * kKvTile, b.v_min + t * kKvTile);
  }
  find_next(s, k, v, end, b);
}

// What one unit of 16 bits is worth where `bits` are those of the largest |x| and `total` is the sum
// of |x|, so that both x and the sum of its products with codes fit; NaN if there was one. And its
// inverse.
HAL_INLINE float unit16(int32_t bits, float total, float limit, float* inverse) {
  float largest;
  __builtin_memcpy(&largest, &bits, 4);
  *inverse = 0.0f;
  if (largest != largest) return largest;
  if (!(largest > 1e-30f)) return 0.0f;
  const float by_sum = limit / total, by_largest = 32767.0f / largest;
  *inverse = by_sum < by_largest ? by_sum : by_largest;
  return 1.0f / *inverse;
}

HAL_INLINE void narrow16(const float* x, int64_t count, float scale, int16_t* out) {
  for (int64_t i = 0; i < count; i += 16) store16(out + i, to_int(vmul(vload(x + i), vset(scale))));
}

// The same; also whether a few numbers so stand out that 16 bits leave the others fewer digits than
// bf16 has: most are below 64 units.
HAL_INLINE bool narrow16_checked(const float* x, int64_t count, float scale, int16_t* out) {
  VF held = vzero();
  for (int64_t i = 0; i < count; i += 16) {
    const VF v = vmul(vload(x + i), vset(scale));
    held = vadd(held, vmin(vset(512.0f), vabs(v)));
    store16(out + i, to_int(v));
  }
  return scale > 0.0f && hsum(held) < 64.0f * (float)count;
}

static void round_query(const KvSide& k, const float* q, int32_t* q16, float* step, float* sum, bool* wide) {
  VF plain = vzero(), total = vzero();
  VI most = izero();
  for (int64_t i = 0; i < k.dim; i += 16) {
    const VF v = vload(q + i);
    plain = vadd(plain, v);
    total = vadd(total, vabs(v));
    most = imax(most, abs_bits(v));
  }
  *sum = hsum(plain);
  *step = 1.0f;
  *wide = false;
  if (in_floats(k)) return;
  float inverse;
  const float all = hsum(total);
  *step = unit16(himax(most), all, k.limit, &inverse) * k.step;
  *wide = narrow16_checked(q, k.dim, inverse, (int16_t*)q16);
}

// Queries times the scales of each channel, also in 16 bits: any sum of these with 8-bit codes fits.
template <int R, bool MIN>
static void fold_channels(const float* q, int64_t dim, const uint16_t* scales, Work& w, float* unit,
                          float* bias, bool* wide) {
  VI most[R];
  VF low[R];
  for (int r = 0; r < R; ++r) {
    most[r] = izero();
    low[r] = vzero();
  }
  for (int64_t i = 0; i < dim; i += 16) {
    const VF scale = vload_half(scales + i);
    const VF minimum = MIN ? vload_half(scales + dim + i) : vzero();
    for (int r = 0; r < R; ++r) {
      const VF v = vload(q + r * dim + i), y = vmul(v, scale);
      if (MIN) low[r] = vfma(v, minimum, low[r]);
      most[r] = imax(most[r], abs_bits(y));
      vstore(w.folded + r * kKvMaxDim + i, y);
    }
  }
  float inverse[R];
  for (int r = 0; r < R; ++r) {
    unit[r] = unit16(himax(most[r]), 1.0f, __builtin_inff(), &inverse[r]);
    bias[r] = MIN ? hsum(low[r]) : 0.0f;
  }
  for (int r = 0; r < R; ++r)
    wide[r] = narrow16_checked(w.folded + r * kKvMaxDim, dim, inverse[r], (int16_t*)(w.folded16 + r * kKvMaxDim / 2));
}

using Fold = void (*)(const float*, int64_t, const uint16_t*, Work&, float*, float*, bool*);
static constexpr Fold kFolds[2][kRows] = {
    {fold_channels<1, false>, fold_channels<2, false>, fold_channels<3, false>, fold_channels<4, false>},
    {fold_channels<1, true>, fold_channels<2, true>, fold_channels<3, true>, fold_channels<4, true>}};

// Scores of one query with `count` tiles of the block, up to two, by products of fp32.
static void wide_scores(const KvSide& k, const Block& b, int64_t t, int64_t count, const float* q,
                        float bias, float* decoded, float* s) {
  KvSide codes = k;
  codes.kind = kKvFp32;
  const uint8_t* tiles[2];
  for (int64_t i = 0; i < count; ++i) {
    float* to = decoded + i * kKvTile * k.dim;
    kProducts[k.kind].keys_decoded[1](k, b.k_stored[t + i], b.k_stored[t + i], (int32_t*)to);
    tiles[i] = (const uint8_t*)to;
  }
  const float none = 0.0f;
  kProducts[kKvFp32].keys[0](codes, tiles, tiles, count, q, k.dim, &none, &none, s);
  for (int64_t o = 0; o < count * kKvTile; o += kKvTile) vstore(s + o, vadd(vload(s + o), vset(bias)));
}

// Scores of a group of 32 tokens whose scales are per channel: they go into the queries.
static void channel_scores(const KvSide& k, const KvQueries& q, int64_t first, int64_t rows,
                           const KvSide& codes, Tiles tiles, Tiles ahead, int64_t t, int64_t count, Work& w) {
  const uint16_t* scales = w.block.k_scales[t];
  float unit[kRows], bias[kRows];
  bool wide[kRows];
  kFolds[k.scales == kKvChannelMin][rows - 1](q.q + first * k.dim, k.dim, scales, w, unit, bias, wide);
  const auto products = kProducts[codes.kind].keys[rows - 1];
  float* s = w.s + t * kKvTile;
  if (!k.exact) {
    products(codes, tiles + t, ahead + t, count, w.folded16, kKvMaxDim / 2, unit, bias, s);
    for (int64_t r = 0; r < rows; ++r)
      if (wide[r]) wide_scores(k, w.block, t, count, w.folded + r * kKvMaxDim, bias[r], w.wide, s + r * kKvBlock);
    return;
  }
  products(codes, tiles + t, ahead + t, count, w.folded, kKvMaxDim, unit, bias, s);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t o = 0; o < count * kKvTile; o += kKvTile)
      vstore(s + r * kKvBlock + o, vadd(vload(s + r * kKvBlock + o), vset(bias[r])));
}

// Scores of a block with scales per token or none, before those.
static void token_scores(const KvSide& k, const KvQueries& q, int64_t first, int64_t rows,
                         const KvSide& codes, Tiles tiles, Tiles ahead, Work& w) {
  const Block& b = w.block;
  const float zero[kRows] = {};
  const auto products = kProducts[codes.kind].keys[rows - 1];
  const float* x = q.q + first * k.dim;
  if (in_floats(k)) return products(codes, tiles, ahead, b.tiles, x, k.dim, zero, zero, w.s);
  products(codes, tiles, ahead, b.tiles, q.q16 + first * k.dim / 2, k.dim / 2, q.q_step + first, zero, w.s);
  for (int64_t r = 0; r < rows; ++r) {
    if (!q.q_wide[first + r]) continue;
    for (int64_t t = 0; t < b.tiles; t += 2)
      wide_scores(k, b, t, b.tiles - t < 2 ? 1 : 2, x + r * k.dim, 0.0f, w.wide, w.s + r * kKvBlock + t * kKvTile);
  }
}

// Raw scores of a block, before scales per token.
static void block_scores(const KvSequence& s, const KvSide& k, const KvSide& codes, const KvSide& tail,
                         const KvQueries& q, int64_t first, int64_t rows, Work& w) {
  const Block& b = w.block;
  if (!per_channel(k)) return token_scores(k, q, first, rows, codes, b.k, b.next_k, w);
  const float zero[kRows] = {};
  for (int64_t t = 0; t < b.tiles; t += 2) {
    const int64_t count = b.tiles - t < 2 ? 1 : 2;
    if (s.tail && b.at + t * kKvTile >= s.tail_begin) {
      const uint8_t* open[2] = {s.tail, s.tail + tail.tile_bytes};
      kProducts[tail.kind].keys[rows - 1](tail, open, open, count, q.q + first * k.dim, k.dim, zero, zero,
                                          w.s + t * kKvTile);
    } else {
      channel_scores(k, q, first, rows, codes, b.k, b.next_k, t, count, w);
    }
  }
}
