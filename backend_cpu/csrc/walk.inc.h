// How many rows and tiles go into one block. Included inside an anonymous namespace, after
// tile_block.inc.h, epilogue.inc.h and, where there is a bf16 dot product, dot_block.inc.h.

// One block of R rows and as many tiles as suit it; returns how many. out is [R][tiles][16].
template <int R>
static int64_t block_step(const Matrix& m, int64_t tile, int64_t left, const Rows& rows,
                          int64_t row, float* out) {
  const float* const* x = rows.x + row;
  const float* const* sums = rows.sums ? rows.sums + row : nullptr;
#ifdef HAL_BF16_DOT
  if (m.bits == 4) {
    if (rows.planes == 1) return dot_step<1, R>(m, tile, left, x, sums, out);
    if (rows.planes == 2) return dot_step<2, R>(m, tile, left, x, sums, out);
    return dot_step<3, R>(m, tile, left, x, sums, out);
  }
#endif
  constexpr int C = block_tiles(R);
  if (left >= C) {
    any_block<R, C>(m, tile, x, sums, out);
    return C;
  }
  any_block<R, 1>(m, tile, x, sums, out);
  return 1;
}

// How many of `left` rows the next block takes.
HAL_INLINE int64_t next_rows(int64_t left) {
  if (left >= kMaxRows) return kMaxRows;
  return left >= 4 ? 4 : left;
}

// The products of `count` rows, a number that next_rows gave, with up to kTilesPerCall tiles:
// out[r * kTilesPerCall * kTile + c * kTile + lane].
static void rows_block(const Matrix& m, int64_t tile, int64_t tiles, const Rows& rows, int64_t row,
                       int64_t count, float* out) {
  constexpr int64_t kLine = kTilesPerCall * kTile;
  alignas(64) float buffer[kMaxRows * kLine];
  for (int64_t done = 0; done < tiles;) {
    const int64_t at = tile + done, left = tiles - done;
    const int64_t step = count == 1   ? block_step<1>(m, at, left, rows, row, buffer)
                         : count == 2 ? block_step<2>(m, at, left, rows, row, buffer)
                         : count == 3 ? block_step<3>(m, at, left, rows, row, buffer)
                         : count == 4 ? block_step<4>(m, at, left, rows, row, buffer)
                                      : block_step<kMaxRows>(m, at, left, rows, row, buffer);
    for (int64_t r = 0; r < count; ++r)
      for (int64_t c = 0; c < step; ++c)
        vstore(out + r * kLine + (done + c) * kTile, vload(buffer + (r * step + c) * kTile));
    done += step;
  }
}

static void linear(const Matrix& m, int64_t tile, int64_t tiles, const Rows& rows,
                   void* const* out, FloatKind out_kind) {
  constexpr int64_t kLine = kTilesPerCall * kTile;
  alignas(64) float buffer[kMaxRows * kLine];
  for (int64_t r0 = 0; r0 < rows.count;) {
    const int64_t step = next_rows(rows.count - r0);
    rows_block(m, tile, tiles, rows, r0, step, buffer);
    for (int64_t c = 0; c < tiles; ++c) {
      const int64_t col = (tile + c) * kTile;
      const VF bias =
          m.bias ? load_lanes(m.bias, m.bias_kind, col, m.n - col) : vzero();
      for (int64_t r = 0; r < step; ++r) {
        VF v = vload(buffer + r * kLine + c * kTile);
        if (m.bias) v = vadd(v, bias);
        store_lanes(out[r0 + r], out_kind, col, v, m.n - col);
      }
    }
    r0 += step;
  }
}

static void gate_up(const Matrix* gate, const Matrix& up, int64_t tile, int64_t tiles,
                    const Rows& gate_rows, const Rows& up_rows, const Activation& act,
                    float* const* h) {
  constexpr int64_t kLine = kTilesPerCall * kTile;
  alignas(64) float a[kMaxRows * kLine];
  alignas(64) float b[kMaxRows * kLine];
  for (int64_t r0 = 0; r0 < up_rows.count;) {
    const int64_t step = next_rows(up_rows.count - r0);
    if (gate) rows_block(*gate, tile, tiles, gate_rows, r0, step, a);
    rows_block(up, tile, tiles, up_rows, r0, step, b);
    for (int64_t c = 0; c < tiles; ++c) {
      const int64_t col = (tile + c) * kTile;
      const int64_t lanes = up.n - col < kTile ? up.n - col : kTile;
      const VF up_bias = up.bias ? load_lanes(up.bias, up.bias_kind, col, lanes) : vzero();
      const VF gate_bias =
          gate && gate->bias ? load_lanes(gate->bias, gate->bias_kind, col, lanes) : vzero();
      for (int64_t r = 0; r < step; ++r) {
        const VF u = vadd(vload(b + r * kLine + c * kTile), up_bias);
        const VF g = gate ? vadd(vload(a + r * kLine + c * kTile), gate_bias) : u;
        float* dst = h[r0 + r] + col;
        vstore(dst, gated(gate != nullptr, g, u, act));
        // The next matrix reads whole words of k: what lies past the last column must be zero.
        for (int64_t j = lanes; j < kTile; ++j) dst[j] = 0.0f;
      }
    }
    r0 += step;
  }
}
