// Attention over plain keys and values: blocks of kAttendKeys tokens, a few query rows at a time, with
// a running maximum. Included inside an anonymous namespace, after epilogue.inc.h and kv_simd_*.h.
//
// Many rows read their keys turned, [dim][kAttendKeys], so that a vector holds one channel of sixteen
// keys; for fewer than kTurnRows, turning would cost more than the sums across lanes that it saves.

constexpr int kAttendRows = kMaxRows;
constexpr int64_t kTurnRows = 12;

HAL_INLINE float* lined(float* p) { return (float*)(((uintptr_t)p + 63) / 64 * 64); }

static int64_t attend_floats(int64_t rows, int64_t dim) {
  return rows * dim + 3 * kAttendKeys * dim + kAttendRows * kAttendKeys + 5 * kTile;
}

// `count` rows as floats: where they are, if they are floats.
static const float* as_floats(const void* base, FloatKind kind, int64_t first, int64_t count,
                              int64_t dim, float* to) {
  if (kind == kFloat32) return (const float*)base + first * dim;
  for (int64_t i = 0; i < count * dim; i += kTile) vstore(to + i, load_kind(base, kind, first * dim + i));
  return to;
}

static void turn_keys(const float* keys, int64_t count, int64_t dim, float* turned_keys) {
  for (int64_t j = 0; j < kAttendKeys; ++j)
    for (int64_t d = 0; d < dim; ++d) {
      float key = 0.0f;  // copied: a cache's memory may begin anywhere
      if (j < count) __builtin_memcpy(&key, keys + j * dim + d, sizeof key);
      turned_keys[d * kAttendKeys + j] = key;
    }
}

// out[r][col .. ] (+)= sum over i < depth of a[r * a_step + i] * b[i * b_step + col ..]
template <int R, int C, bool ADD>
HAL_INLINE void multiply(const float* a, int64_t a_step, const float* b, int64_t b_step,
                         int64_t depth, const float* factor, float* out, int64_t out_step) {
  VF sum[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c)
      sum[r][c] = ADD ? vmul(vload(out + r * out_step + c * kTile), vset(factor[r])) : vzero();
  for (int64_t i = 0; i < depth; ++i) {
    VF line[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) line[c] = vload(b + i * b_step + c * kTile);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const VF own = vset(a[r * a_step + i]);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) sum[r][c] = vfma(own, line[c], sum[r][c]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) vstore(out + r * out_step + c * kTile, sum[r][c]);
}

// As multiply, for all `columns` of b.
template <int R, bool ADD>
static __attribute__((noinline)) void multiply_rows(const float* a, int64_t a_step, const float* b,
                                                    int64_t columns, int64_t depth,
                                                    const float* factor, float* out,
                                                    int64_t out_step) {
  constexpr int C = block_tiles(R);
  int64_t col = 0;
  for (; col + C * kTile <= columns; col += C * kTile)
    multiply<R, C, ADD>(a, a_step, b + col, columns, depth, factor, out + col, out_step);
  for (; col < columns; col += kTile)
    multiply<R, 1, ADD>(a, a_step, b + col, columns, depth, factor, out + col, out_step);
}

static void dot_keys(const float* q, const float* keys, int64_t count, int64_t dim, int64_t rows,
                     float* scores) {
  for (int64_t j = 0; j < count; ++j)
    for (int64_t r = 0; r < rows; ++r) {
      VF sum = vzero();
      for (int64_t d = 0; d < dim; d += kTile) sum = vfma(vload(q + r * dim + d), vload(keys + j * dim + d), sum);
      scores[r * kAttendKeys + j] = hsum(sum);
    }
}

static float exp_of(float v) {
  float lane[kTile];
  vstore(lane, vexp(vset(v)));
  return lane[0];
}

// Scores of one row to weights, zero from `seen` on; returns what the sums so far are multiplied with.
static float soften(float* scores, int64_t seen, float* max, float* sum) {
  if (seen <= 0) {
    for (int64_t j = 0; j < kAttendKeys; ++j) scores[j] = 0.0f;
    return 1.0f;
  }
  for (int64_t j = seen; j < kAttendKeys; ++j) scores[j] = -__builtin_inff();
  VF most = vset(*max);
  for (int64_t j = 0; j < kAttendKeys; j += kTile) most = vmax(most, vload(scores + j));
  const float top = hmax(most);
  VF total = vzero();
  for (int64_t j = 0; j < kAttendKeys; j += kTile) {
    const VF v = vexp(vsub(vload(scores + j), vset(top)));
    vstore(scores + j, v);
    total = vadd(total, v);
  }
  // vexp never reaches zero, and what is not seen must.
  for (int64_t j = seen; j < kAttendKeys; ++j) scores[j] = 0.0f;
  const float factor = exp_of(*max - top);
  *max = top;
  *sum = *sum * factor + hsum(total);
  return factor;
}

struct KeyBlock {
  const float *keys, *turned, *values;  // turned: null for few rows
  int64_t begin, count;
};

template <int R>
static void attend_rows(const Attend& a, const KeyBlock& block, int64_t row, const float* q,
                        const AttendSums& to, float* scores) {
  const float* own = q + row * a.dim;
  if (block.turned) multiply_rows<R, false>(own, a.dim, block.turned, kAttendKeys, a.dim, nullptr, scores, kAttendKeys);
  else dot_keys(own, block.keys, block.count, a.dim, R, scores);
  float factor[R];
  for (int r = 0; r < R; ++r) {
    int64_t seen = a.seen + (row + r) / a.per_kv - block.begin;
    if (seen > block.count) seen = block.count;
    factor[r] = soften(scores + r * kAttendKeys, seen, to.max + row + r, to.sum + row + r);
  }
  multiply_rows<R, true>(scores, kAttendKeys, block.values, a.dim, block.count, factor,
                         to.acc + row * a.dim, a.dim);
}

static void load_queries(const Attend& a, float* q) {
  const VF scale = vset(a.scale);
  for (int64_t i = 0; i < a.rows; ++i)
    for (int64_t d = 0; d < a.dim; d += kTile) {
      const int64_t at = i / a.per_kv * a.q_step + i % a.per_kv * a.dim + d;
      vstore(q + i * a.dim + d, vmul(load_kind(a.q, a.kind, at), scale));
    }
}

static void attend(const Attend& a, int64_t begin, int64_t end, const AttendSums& to, float* work) {
  float* q = lined(work);
  float* turned_keys = lined(q + a.rows * a.dim);
  float* wide_keys = turned_keys + kAttendKeys * a.dim;
  float* wide_values = wide_keys + kAttendKeys * a.dim;
  float* scores = wide_values + kAttendKeys * a.dim;
  load_queries(a, q);
  for (int64_t i = 0; i < a.rows; ++i) to.max[i] = -__builtin_inff(), to.sum[i] = 0.0f;
  for (int64_t i = 0; i < a.rows * a.dim; ++i) to.acc[i] = 0.0f;
  for (int64_t first = begin; first < end; first += kAttendKeys) {
    KeyBlock block{nullptr, nullptr, nullptr, first, end - first < kAttendKeys ? end - first : kAttendKeys};
    block.keys = as_floats(a.keys, a.kind, first, block.count, a.dim, wide_keys);
    block.values = as_floats(a.values, a.kind, first, block.count, a.dim, wide_values);
    if (a.rows >= kTurnRows) {
      turn_keys(block.keys, block.count, a.dim, turned_keys);
      block.turned = turned_keys;
    }
    int64_t row = 0;
    for (; row + kAttendRows <= a.rows; row += kAttendRows) attend_rows<kAttendRows>(a, block, row, q, to, scores);
    for (; row + 3 <= a.rows; row += 3) attend_rows<3>(a, block, row, q, to, scores);
    for (; row < a.rows; ++row) attend_rows<1>(a, block, row, q, to, scores);
  }
}

static void finish(const Attend& a, const AttendSums& first, int64_t count, int64_t step) {
  for (int64_t i = 0; i < a.rows; ++i) {
    float* acc = first.acc + i * a.dim;
    float top = first.max[i], total = 0.0f;
    for (int64_t s = 1; s < count; ++s) top = top < first.max[s * step + i] ? first.max[s * step + i] : top;
    for (int64_t s = 0; s < count; ++s) {
      const float factor = count == 1 ? 1.0f : exp_of(first.max[s * step + i] - top);
      total += first.sum[s * step + i] * factor;
      for (int64_t d = 0; d < a.dim && count > 1; d += kTile) {
        const VF part = vmul(vload(acc + s * step + d), vset(factor));
        vstore(acc + d, s ? vadd(vload(acc + d), part) : part);
      }
    }
    const int64_t at = i / a.per_kv * a.out_step + i % a.per_kv * a.dim;
    const VF share = vset(1.0f / total);
    for (int64_t d = 0; d < a.dim; d += kTile) store_kind(a.out, a.kind, at + d, vmul(vload(acc + d), share));
  }
}
