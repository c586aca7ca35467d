// Rows between the matrices of a decoder layer: norm, rotary embedding, activation, residual.
// Included inside an anonymous namespace, after epilogue.inc.h. Each rounds to the model's dtype where
// transformers' modules do, which for float32 is nowhere.

static VF rounded(VF v, FloatKind kind) {
  if (kind == kFloat32) return v;
  char line[kTile * 4];
  store_kind(line, kind, 0, v);
  return load_kind(line, kind, 0);
}

// As load_lanes and store_lanes, in place where the vector is whole.
HAL_INLINE VF take(const void* base, FloatKind kind, int64_t i, int64_t lanes) {
  return lanes == kTile ? load_kind(base, kind, i) : load_lanes(base, kind, i, lanes);
}
HAL_INLINE void give(void* base, FloatKind kind, int64_t i, VF v, int64_t lanes) {
  if (lanes == kTile) return store_kind(base, kind, i, v);
  store_lanes(base, kind, i, v, lanes);
}

HAL_INLINE int64_t lanes_at(int64_t i, int64_t n) { return n - i < kTile ? n - i : kTile; }

static float lane_sum(VF v) {
  float lane[kTile];
  vstore(lane, v);
  for (int64_t half = kTile / 2; half > 0; half /= 2)
    for (int64_t j = 0; j < half; ++j) lane[j] += lane[j + half];
  return lane[0];
}

static void norm_row(const void* x, const void* weight, float eps, void* out, FloatKind kind,
                     int64_t n) {
  VF squares = vzero();
  for (int64_t i = 0; i < n; i += kTile) {
    const VF v = take(x, kind, i, lanes_at(i, n));
    squares = vfma(v, v, squares);
  }
  const VF factor = vset(1.0f / __builtin_sqrtf(lane_sum(squares) / (float)n + eps));
  for (int64_t i = 0; i < n; i += kTile) {
    const int64_t lanes = lanes_at(i, n);
    const VF v = rounded(vmul(take(x, kind, i, lanes), factor), kind);
    give(out, kind, i, vmul(take(weight, kind, i, lanes), v), lanes);
  }
}

static void add_row(const void* a, const void* b, void* out, FloatKind kind, int64_t n) {
  for (int64_t i = 0; i < n; i += kTile) {
    const int64_t lanes = lanes_at(i, n);
    give(out, kind, i, vadd(take(a, kind, i, lanes), take(b, kind, i, lanes)), lanes);
  }
}

static void gate_row(const void* gate, const void* up, const Activation& act, void* out,
                     FloatKind kind, int64_t n) {
  for (int64_t i = 0; i < n; i += kTile) {
    const int64_t lanes = lanes_at(i, n);
    const VF v = rounded(activate(take(gate, kind, i, lanes), act), kind);
    give(out, kind, i, vmul(v, take(up, kind, i, lanes)), lanes);
  }
}

// Products and their sum are rounded apart, as the model's own modules do.
static VF turned(VF x, VF cos, VF y, VF sin, FloatKind kind) {
  return vadd(rounded(vmul(x, cos), kind), rounded(vmul(y, sin), kind));
}

static void rotate_row(const void* x, const void* cos, const void* sin, void* out, FloatKind kind,
                       int64_t dim) {
  const int64_t half = dim / 2;
  for (int64_t i = 0; i < half; i += kTile) {
    const int64_t lanes = lanes_at(i, half);
    const auto at = [&](const void* base, int64_t index) { return take(base, kind, index, lanes); };
    const VF a = at(x, i), b = at(x, half + i);
    give(out, kind, i, turned(a, at(cos, i), vsub(vzero(), b), at(sin, i), kind), lanes);
    give(out, kind, half + i, turned(b, at(cos, half + i), a, at(sin, half + i), kind), lanes);
  }
}
