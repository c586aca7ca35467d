// What surrounds the products of records: bias, activation, weighted sum. Included inside an
// anonymous namespace, after epilogue.inc.h and a function `totals`.

constexpr int64_t kLine = kTilesPerCall * kTile;

static VF bias_of(const Matrix& m, int64_t col, int64_t lanes) {
  return m.bias ? load_lanes(m.bias, m.bias_kind, col, lanes) : vzero();
}

static void block_linear(const Matrix& m, const Records& f, int64_t tile, int64_t tiles,
                         const BlockRows& rows, float* work, char* out, int64_t out_step,
                         FloatKind out_kind) {
  totals(m, f, tile, tiles, rows, work, kLine);
  for (int64_t c = 0; c < tiles; ++c) {
    const int64_t col = (tile + c) * kTile, lanes = m.n - col;
    const VF bias = bias_of(m, col, lanes);
    for (int64_t r = 0; r < rows.count; ++r) {
      VF v = vload(work + r * kLine + c * kTile);
      if (m.bias) v = vadd(v, bias);
      store_lanes(out + r * out_step, out_kind, col, v, lanes);
    }
  }
}

static void block_gate_up(const Matrix* gate, const Records& gate_form, const Matrix& up,
                          const Records& up_form, int64_t tile, int64_t tiles,
                          const BlockRows& gate_rows, const BlockRows& up_rows,
                          const Activation& act, float* work, float* h, int64_t h_step) {
  float* other = work + kBandFloats;
  totals(up, up_form, tile, tiles, up_rows, work, kLine);
  if (gate) totals(*gate, gate_form, tile, tiles, gate_rows, other, kLine);
  for (int64_t c = 0; c < tiles; ++c) {
    const int64_t col = (tile + c) * kTile;
    const int64_t lanes = up.n - col < kTile ? up.n - col : kTile;
    const VF up_bias = bias_of(up, col, lanes);
    const VF gate_bias = gate ? bias_of(*gate, col, lanes) : vzero();
    for (int64_t r = 0; r < up_rows.count; ++r) {
      const VF u = vadd(vload(work + r * kLine + c * kTile), up_bias);
      const VF g = gate ? vadd(vload(other + r * kLine + c * kTile), gate_bias) : u;
      const VF value = gated(gate != nullptr, g, u, act);
      vstore(h + r * h_step + col, _mm512_maskz_mov_ps(lanes_of(lanes), value));
    }
  }
}

static void block_add(const Matrix& m, const Records& f, int64_t tile, int64_t tiles,
                      const BlockRows& rows, const int32_t* to, const float* weights, float* work,
                      float* sums, int64_t sums_step) {
  totals(m, f, tile, tiles, rows, work, kLine);
  for (int64_t c = 0; c < tiles; ++c) {
    const int64_t col = (tile + c) * kTile;
    const VF bias = bias_of(m, col, m.n - col);
    for (int64_t r = 0; r < rows.count; ++r) {
      const VF y = vadd(vload(work + r * kLine + c * kTile), bias);
      float* sum = sums + to[r] * sums_step + c * kTile;
      vstore(sum, vfma(y, vset(weights[r]), vload(sum)));
    }
  }
}
