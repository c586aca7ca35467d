// Rows of floats around the products: in and out, rotations, partial results merged. Included
// inside an anonymous namespace, after kv_split.inc.h.

static void load_floats(const void* src, FloatKind kind, float scale, float* dst, int64_t count) {
  const VF s = vset(scale);
  for (int64_t i = 0; i < count; i += 16) {
    const VF v = kind == kFloat32   ? vload((const float*)src + i)
                 : kind == kFloat16 ? vload_half((const uint16_t*)src + i)
                                    : vload_bf16((const uint16_t*)src + i);
    vstore(dst + i, vmul(v, s));
  }
}

static void store_floats(const float* src, float scale, void* dst, FloatKind kind, int64_t count) {
  const VF s = vset(scale);
  for (int64_t i = 0; i < count; i += 16) {
    const VF v = vmul(vload(src + i), s);
    if (kind == kFloat32) vstore((float*)dst + i, v);
    else if (kind == kFloat16) vstore_half((uint16_t*)dst + i, v);
    else vstore_bf16((uint16_t*)dst + i, v);
  }
}

static void halves(const uint16_t* src, float* dst, int64_t count) {
  alignas(32) uint16_t line[16] = {};
  float wide[16];
  for (int64_t i = 0; i < count; i += 16) {
    const int64_t left = count - i < 16 ? count - i : 16;
    __builtin_memcpy(line, src + i, (size_t)left * 2);
    vstore(wide, vload_half(line));
    __builtin_memcpy(dst + i, wide, (size_t)left * 4);
  }
}

static void merge(float* max, float* sum, float* acc, float other_max, float other_sum,
                  const float* other, int64_t dim) {
  if (other_max == kNothing) return;
  const float after = other_max < *max ? *max : other_max;
  float lane[16];
  vstore(lane, vexp(vset(*max - after)));
  const float mine = *max == kNothing ? 0.0f : lane[0];
  vstore(lane, vexp(vset(other_max - after)));
  const VF a = vset(mine), b = vset(lane[0]);
  *sum = *sum * mine + other_sum * lane[0];
  *max = after;
  for (int64_t i = 0; i < dim; i += 16)
    vstore(acc + i, vfma(vload(acc + i), a, vmul(vload(other + i), b)));
}

// Rows of x times a column strip of the matrix, so that a strip is read once for a few rows.
template <int R>
HAL_INLINE void rotate_rows(const float* x, const float* matrix, float* out, int64_t dim) {
  for (int64_t c = 0; c < dim; c += 16) {
    VF sum[R];
    for (int r = 0; r < R; ++r) sum[r] = vzero();
    for (int64_t j = 0; j < dim; ++j) {
      const VF m = vload(matrix + j * dim + c);
      for (int r = 0; r < R; ++r) sum[r] = vfma(m, vset(x[r * dim + j]), sum[r]);
    }
    for (int r = 0; r < R; ++r) vstore(out + r * dim + c, sum[r]);
  }
}

static void rotate(const float* x, const float* matrix, float* out, int64_t rows, int64_t dim) {
  for (; rows >= 4; rows -= 4, x += 4 * dim, out += 4 * dim) rotate_rows<4>(x, matrix, out, dim);
  for (; rows > 0; --rows, x += dim, out += dim) rotate_rows<1>(x, matrix, out, dim);
}
