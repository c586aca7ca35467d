// Attention of a few queries over up to kKvSplit tokens of one kv head: online softmax of the scores
// and weighted values, a block at a time. Included inside an anonymous namespace, after
// kv_scores.inc.h and kv_exp.inc.h.

// cap tanh(s / cap). Below 0.625 as s times a polynomial in (s / cap)^2, fitted to 2e-8: 1 - 2 / (e + 1)
// loses the digits of what is small against the cap, and (s / cap) times the cap those below float's range.
HAL_INLINE VF soft_capped(VF s, float cap) {
  const VF x = vdiv(s, vset(cap)), z = vmul(x, x), one = vset(1.0f);
  VF p = vset(-6.1049480e-3f);
  p = vfma(p, z, vset(2.1003641e-2f));
  p = vfma(p, z, vset(-5.3852499e-2f));
  p = vfma(p, z, vset(1.3332783e-1f));
  p = vfma(p, z, vset(-3.3333328e-1f));
  const VF small = vfma(vmul(p, z), s, s);
  const VF t = vsub(one, vdiv(vset(2.0f), vadd(vexp(vadd(x, x)), one)));
  return choose(over(vset(0.625f), vabs(x)), small, vmul(t, vset(cap)));
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
