// What surrounds the inner product: rows in, bias, activation, weighted sum, rows out. Included
// inside an anonymous namespace, after tile_block.inc.h.

HAL_INLINE void store_kind(void* base, FloatKind kind, int64_t index, VF v) {
  switch (kind) {
    case kFloat16:
      return vstore_half((uint16_t*)base + index, v);
    case kBFloat16:
      return vstore_bf16((uint16_t*)base + index, v);
    default:
      return vstore((float*)base + index, v);
  }
}

static void store_lanes(void* base, FloatKind kind, int64_t index, VF v, int64_t lanes) {
  if (lanes >= kTile) return store_kind(base, kind, index, v);
  const int64_t size = kind == kFloat32 ? 4 : 2;
  char line[kTile * 4];
  store_kind(line, kind, 0, v);
  __builtin_memcpy((char*)base + index * size, line, (size_t)(lanes * size));
}

static VF load_lanes(const void* base, FloatKind kind, int64_t index, int64_t lanes) {
  if (lanes >= kTile) return load_kind(base, kind, index);
  const int64_t size = kind == kFloat32 ? 4 : 2;
  char line[kTile * 4] = {0};
  __builtin_memcpy(line, (const char*)base + index * size, (size_t)(lanes * size));
  return load_kind(line, kind, 0);
}

static bool load_row(const void* src, FloatKind kind, const int32_t* perm, float scale, float* dst,
                     int64_t k, int64_t padded) {
  const VF factor = vset(scale);
  bool inside = true;
  for (int64_t i = 0; i < padded; i += kTile) {
    const int64_t lanes = k - i < kTile ? (k - i < 0 ? 0 : k - i) : kTile;
    VF v;
    if (perm) {
      // A gather of two-byte values has no instruction; a line of them is picked by hand.
      uint32_t line[kTile] = {0};
      for (int64_t j = 0; j < lanes; ++j) {
        const uint32_t at = (uint32_t)perm[i + j];
        const bool ok = at < (uint64_t)k;
        inside &= ok;
        const uint32_t from = ok ? at : 0;
        if (kind == kFloat32) line[j] = ((const uint32_t*)src)[from];
        else ((uint16_t*)line)[j] = ((const uint16_t*)src)[from];
      }
      v = load_kind(line, kind, 0);
    } else {
      v = load_lanes(src, kind, i, lanes);
    }
    vstore(dst + i, vmul(v, factor));
  }
  return inside;
}

[[maybe_unused]] static void block_sums(const float* x, int64_t k, int64_t group, float* sums) {
  for (int64_t first = 0; first < k; first += group) {
    const int64_t last = first + group < k ? first + group : k;
    for (int64_t begin = first; begin < last; begin += kBlock) {
      const int64_t end = begin + kBlock < last ? begin + kBlock : last;
      VF sum = vzero();
      int64_t i = begin;
      for (; i + kTile <= end; i += kTile) sum = vadd(sum, vload(x + i));
      float lane[kTile];
      vstore(lane, sum);
      for (int64_t j = 0; i < end; ++i, ++j) lane[j] += x[i];
      for (int64_t half = kTile / 2; half > 0; half /= 2)
        for (int64_t j = 0; j < half; ++j) lane[j] += lane[j + half];
      *sums++ = lane[0];
    }
  }
}

// e^v to about one unit in the last place; the argument is held where 2^n stays a float.
HAL_INLINE VF vexp(VF v) {
  v = vmin(vset(89.0f), vmax(vset(-104.0f), v));
  const VF n = vround(vmul(v, vset(1.44269504f)));
  VF r = vfma(n, vset(-0.693359375f), v);
  r = vfma(n, vset(2.12194440e-4f), r);
  VF p = vset(1.0f / 5040);
  p = vfma(p, r, vset(1.0f / 720));
  p = vfma(p, r, vset(1.0f / 120));
  p = vfma(p, r, vset(1.0f / 24));
  p = vfma(p, r, vset(1.0f / 6));
  p = vfma(p, r, vset(0.5f));
  p = vfma(p, r, vset(1.0f));
  p = vfma(p, r, vset(1.0f));
  return vmul(p, vpow2(n));
}

// v * sigmoid(t)
HAL_INLINE VF vgate(VF v, VF t) {
  return vdiv(v, vadd(vset(1.0f), vexp(vsub(vzero(), t))));
}

extern "C" float erff(float) noexcept;

static VF vgelu(VF v) {
  float line[kTile];
  vstore(line, v);
  for (int64_t i = 0; i < kTile; ++i)
    line[i] = 0.5f * line[i] * (1.0f + erff(line[i] * 0.70710678118654752f));
  return vload(line);
}

HAL_INLINE VF activate(VF gate, const Activation& act) {
  switch (act.kind) {
    case kGelu:
      return vgelu(gate);
    case kGeluTanh: {
      const VF cube = vmul(vmul(gate, gate), gate);
      const VF inner = vfma(cube, vset(0.044715f), gate);
      return vgate(gate, vmul(inner, vset(2.0f * 0.79788456080286536f)));
    }
    case kRelu2: {
      const VF positive = vmax(vzero(), gate);
      return vmul(positive, positive);
    }
    default:  // silu and swiglu_oai
      return vgate(gate, vmul(gate, vset(act.alpha)));
  }
}

HAL_INLINE VF gated(bool has_gate, VF gate, VF up, const Activation& act) {
  if (act.has_limit) {
    gate = vmin(vset(act.limit), gate);
    up = vmin(vset(act.limit), vmax(vset(-act.limit), up));
  }
  const VF value = activate(has_gate ? gate : up, act);
  if (!has_gate) return value;
  return vmul(act.kind == kSwigluOai ? vadd(up, vset(1.0f)) : up, value);
}

static void combine(const float* const* rows, const float* weights, int64_t count, float scaling,
                    void* out, FloatKind out_kind, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i += kTile) {
    VF sum = vzero();
    // Source rows are padded to a whole tile; only the destination ends early.
    for (int64_t j = 0; j < count; ++j)
      sum = vfma(vload(rows[j] + i), vset(weights[j]), sum);
    store_lanes(out, out_kind, i, vmul(sum, vset(scaling)), end - i);
  }
}
