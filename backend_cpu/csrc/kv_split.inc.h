// Attention of a few queries over up to kKvSplit tokens of one kv head: scores, online softmax and
// weighted values, a block at a time. Included inside an anonymous namespace, after
// kv_products.inc.h and epilogue.inc.h.

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

HAL_INLINE VF soft_capped(VF s, float cap) {
  const VF e = vexp(vmul(s, vset(2.0f / cap)));
  const VF one = vset(1.0f), t = vsub(one, vdiv(vset(2.0f), vadd(e, one)));
  return vmul(t, vset(cap));
}

HAL_INLINE Mask seen(const KvQueries& q, int64_t i, int64_t at) {
  const int64_t sink = q.sink < q.high[i] ? q.sink : q.high[i];
  return mask_or(mask_range(q.low[i] - at, q.high[i] - at), mask_range(0, sink - at));
}

// Scores as they enter the softmax, in place; returns the largest.
static float block_logits(const KvSide& k, const KvQueries& q, int64_t i, int64_t r, Work& w) {
  const Block& b = w.block;
  float* s = w.s + r * kKvBlock;
  const bool all = q.low[i] <= b.at && q.high[i] >= b.at + b.tiles * kKvTile;
  const bool scaled = k.scales == kKvToken || k.scales == kKvTokenMin;
  VF most = vset(kNothing);
  for (int64_t o = 0; o < b.tiles * kKvTile; o += kKvTile) {
    VF v = vload(s + o);
    if (scaled) v = vmul(v, vload(b.k_scale + o));
    if (k.scales == kKvTokenMin) v = vfma(vload(b.k_min + o), vset(q.q_sum[i]), v);
    if (q.soft_cap > 0) v = soft_capped(v, q.soft_cap);
    // Of an infinite key: seen, though it weighs nothing.
    v = vmax(vset(kLowest), v);
    if (!all) v = choose(seen(q, i, b.at + o), v, vset(kNothing));
    vstore(s + o, v);
    most = vmax(most, v);
  }
  return hmax(most);
}

// e^v for v <= 0; the argument's rounding shows in what is small anyway.
HAL_INLINE VF exp_below(VF v) {
  const VF x = vmax(vset(-150.0f), vmul(v, vset(1.44269504f)));
  const VF n = vround(x), r = vsub(x, n);
  VF p = vset(1.5461445e-4f);
  p = vfma(p, r, vset(1.3400428e-3f));
  p = vfma(p, r, vset(9.6180567e-3f));
  p = vfma(p, r, vset(5.5503272e-2f));
  p = vfma(p, r, vset(2.4022651e-1f));
  p = vfma(p, r, vset(6.9314721e-1f));
  p = vfma(p, r, vset(1.0f));
  return vmul(p, vpow2(n));
}

// Logits to weights times the values' scales, in place, and in 16 bits for values in codes; carries
// the maximum and the sum on. False if nothing is seen.
static bool block_weights(const KvSide& v, const KvQueries& q, int64_t i, int64_t r, float now, Work& w) {
  const Block& b = w.block;
  float* s = w.s + r * kKvBlock;
  const float before = q.max[i], after = now < before ? before : now;
  if (after == kNothing) return false;
  float lane[16];
  vstore(lane, exp_below(vset(before - after)));
  w.correct[r] = before == kNothing ? 0.0f : lane[0];
  const bool scaled = v.scales != kKvPlain, minima = v.scales == kKvTokenMin;
  VF sum = vzero(), shift = vzero(), total = vzero();
  VI most = izero();
  for (int64_t o = 0; o < b.tiles * kKvTile; o += kKvTile) {
    const VF logit = vload(s + o);
    const Mask some = above_nothing(logit);
    const VF p = choose(some, exp_below(vsub(logit, vset(after))), vzero());
    sum = vadd(sum, p);
    // Scales of tokens that are not seen may be anything, NaN too.
    const VF y = scaled ? choose(some, vmul(p, vload(b.v_scale + o)), vzero()) : p;
    if (minima) shift = vadd(shift, choose(some, vmul(p, vload(b.v_min + o)), vzero()));
    total = vadd(total, vabs(y));
    most = imax(most, abs_bits(y));
    vstore(s + o, y);
  }
  w.shift[r] = minima ? hsum(shift) : 0.0f;
  q.max[i] = after;
  q.sum[i] = q.sum[i] * w.correct[r] + hsum(sum);
  if (in_floats(v)) return true;
  float inverse;
  w.unit[r] = unit16(himax(most), hsum(total), v.limit, &inverse) * v.step;
  narrow16(s, b.tiles * kKvTile, inverse, (int16_t*)(w.p16 + r * kKvBlock / 2));
  return true;
}

// Float values of tokens that are not seen may be NaN, which a weight of 0 does not stop: once one
// turns up, the block is summed again over the seen tokens alone.
static void careful_values(const KvSide& v, const KvQueries& q, int64_t i, int64_t r, Work& w,
                           Tiles tiles) {
  const Block& b = w.block;
  float* fresh = w.fresh + r * kKvMaxDim;
  for (int64_t d = 0; d < v.dim; d += 16) vstore(fresh + d, vzero());
  for (int64_t t = 0; t < b.tiles; ++t) {
    const float* tile = (const float*)tiles[t];
    if (v.kind != kKvFp32) {
      kProducts[v.kind].values_decoded[0](v, tiles[t], tiles[t], (int32_t*)w.careful);
      tile = w.careful;
    }
    for (int64_t j = 0; j < kKvTile; ++j) {
      const int64_t at = b.at + t * kKvTile + j;
      if (!((at >= q.low[i] || at < q.sink) && at < q.high[i])) continue;
      const VF p = vset(w.s[r * kKvBlock + t * kKvTile + j]);
      for (int64_t g = 0; g < v.dim / 16; ++g) {
        float* to = fresh + g * 16;
        vstore(to, vfma(vload(tile + (g * 16 + j) * 16), p, vload(to)));
      }
    }
  }
}

static void block_values(const KvSide& v, const KvSide& codes, Tiles tiles, Tiles ahead,
                         const KvQueries& q, int64_t first, int64_t rows, const bool* live, Work& w) {
  const Block& b = w.block;
  const bool floats = in_floats(v);
  for (int64_t r = 0; r < rows; ++r) {
    if (live[r]) continue;
    w.unit[r] = 0.0f;
    for (int64_t o = 0; o < b.tiles * kKvTile; o += 16) vstore(w.s + r * kKvBlock + o, vzero());
    for (int64_t o = 0; o < b.tiles * 8; o += 16) istore(w.p16 + r * kKvBlock / 2 + o, izero());
  }
  kProducts[codes.kind].values[rows - 1](codes, tiles, ahead, b.tiles, floats ? (const void*)w.s : w.p16,
                                         w.unit, w.fresh);
  for (int64_t r = 0; r < rows; ++r) {
    if (!live[r]) continue;
    float* acc = q.acc + (first + r) * v.dim;
    const float* fresh = w.fresh + r * kKvMaxDim;
    if (floats) {
      VF total = vzero();
      for (int64_t d = 0; d < v.dim; d += 16) total = vadd(total, vsub(vload(fresh + d), vload(fresh + d)));
      if (hsum(total) != 0.0f) careful_values(codes, q, first + r, r, w, tiles);
    }
    const VF correct = vset(w.correct[r]), shift = vset(w.shift[r]);
    for (int64_t d = 0; d < v.dim; d += 16)
      vstore(acc + d, vadd(vfma(vload(acc + d), correct, vload(fresh + d)), shift));
  }
}

// A side whose tiles are decoded once, since more rows use them than one pass serves or since their
// products are of fp32.
static KvSide decoded_side(const KvSide& side, bool decode) {
  KvSide codes = side;
  if (!decode) return codes;
  codes.kind = in_floats(side) ? kKvFp32 : kKvInt16;
  codes.tile_bytes = decoded_tile(side);
  return codes;
}

static void decode_block(const KvSide& k, const KvSide& v, const KvSide& k_codes, const KvSide& v_codes,
                         bool keys, bool values, uint8_t* k_to, uint8_t* v_to, Block& b) {
  for (int64_t t = 0; t < b.tiles; ++t, k_to += k_codes.tile_bytes, v_to += v_codes.tile_bytes) {
    if (keys) {
      kProducts[k.kind].keys_decoded[k.exact](k, b.k[t], b.next_k[t], (int32_t*)k_to);
      b.k[t] = b.next_k[t] = k_to;
    }
    if (values) {
      kProducts[v.kind].values_decoded[v.exact](v, b.v[t], b.next_v[t], (int32_t*)v_to);
      b.v[t] = b.next_v[t] = v_to;
    }
  }
}

static void split(const KvSequence& s, const KvSide& k, const KvSide& v, const KvSide& tail,
                  const KvQueries& q, int64_t begin, int64_t end, void* memory) {
  Work& w = *(Work*)memory;
  auto* k_decoded = (uint8_t*)memory + sizeof(Work);
  auto* v_decoded = k_decoded + kKvBlock * k.dim * 4;
  w.wide = (float*)(v_decoded + kKvBlock * v.dim * 4);
  w.careful = w.wide + 2 * kKvTile * k.dim;
  int64_t low = end, high = 0;
  for (int64_t i = 0; i < q.count; ++i) {
    q.max[i] = kNothing;
    q.sum[i] = 0.0f;
    if (q.low[i] < low) low = q.low[i];
    if (q.high[i] > high) high = q.high[i];
  }
  for (int64_t i = 0; i < q.count * v.dim; i += 16) vstore(q.acc + i, vzero());
  if (high < end) end = high;
  const bool keys = k.exact || q.count > kRows, values = v.exact || q.count > kRows;
  const KvSide k_codes = decoded_side(k, keys), v_codes = decoded_side(v, values);
  for (int64_t at = begin; at < end; at += kKvBlock) {
    const int64_t left = end - at < kKvBlock ? end - at : kKvBlock;
    if (at + left <= low && at >= q.sink) continue;
    find_block(s, k, v, at, (left + kKvTile - 1) / kKvTile, end, w.block);
    Block& b = w.block;
    if (keys || values) decode_block(k, v, k_codes, v_codes, keys, values, k_decoded, v_decoded, b);
    for (int64_t first = 0; first < q.count; first += kRows) {
      const int64_t rows = q.count - first < kRows ? q.count - first : kRows;
      block_scores(s, k, k_codes, tail, q, first, rows, w);
      float most[kRows];
      bool live[kRows], any = false;
      for (int64_t r = 0; r < rows; ++r) most[r] = block_logits(k, q, first + r, r, w);
      for (int64_t r = 0; r < rows; ++r) any |= live[r] = block_weights(v, q, first + r, r, most[r], w);
      if (any) block_values(v, v_codes, b.v, b.next_v, q, first, rows, live, w);
    }
  }
}
