// The canonical quantization of hal_core.kv: the same float32 operations in the same order, so that
// codes and scales are equal. Included inside an anonymous namespace, after kv_rows.inc.h.

HAL_INLINE VF finite_or_zero(VF v) { return choose(finite(v), v, vzero()); }

static bool all_finite(const float* x, int64_t count) {
  VF rest = vzero();
  for (int64_t i = 0; i < count; i += 16) rest = vadd(rest, vsub(vload(x + i), vload(x + i)));
  return hsum(rest) == 0.0f;
}

// Stored as fp16, saturating; a NaN stays one.
HAL_INLINE VF saturated(VF v) { return vmin(vset(65504.0f), vmax(vset(-65504.0f), v)); }

HAL_INLINE uint16_t stored_half(float v, float* wide) {
  uint16_t line[16];
  float back[16];
  vstore_half(line, saturated(vset(v)));
  vstore(back, vload_half(line));
  *wide = back[0];
  return line[0];
}

HAL_INLINE float reciprocal(float v) { return v == 0.0f ? 0.0f : 1.0f / v; }

// round((v - minimum) * factor) inside [low, high], 0 for NaN.
HAL_INLINE void store_codes(uint32_t* codes, VF v, VF minimum, VF factor, float low, float high) {
  const VF scaled = vround(vmul(vsub(v, minimum), factor));
  const VF held = vmin(vset(high), vmax(vset(low), scaled));
  istore((int32_t*)codes, to_int(finite_or_zero(held)));
}

static void quantize_integers(const KvSide& side, const float* x, uint32_t* codes, uint16_t* scales) {
  VF low = finite_or_zero(vload(x)), high = low;
  for (int64_t i = 16; i < side.dim; i += 16) {
    const VF v = finite_or_zero(vload(x + i));
    low = vmin(low, v);
    high = vmax(high, v);
  }
  const float nan = __builtin_nanf("");
  const bool spoiled = !all_finite(x, side.dim), eight = side.kind == kKvInt8;
  const float least = -hmax(vsub(vzero(), low)), most = hmax(high);
  const float range = eight ? (most > -least ? most : -least) / 127.0f : (most - least) / 15.0f;
  float scale, minimum = 0.0f;
  scales[0] = stored_half(spoiled ? nan : range, &scale);
  if (!eight) scales[1] = stored_half(least, &minimum);
  const float factor = reciprocal(scale);
  for (int64_t i = 0; i < side.dim; i += 16)
    store_codes(codes + i, finite_or_zero(vload(x + i)), vset(minimum), vset(factor),
                eight ? -127.0f : 0.0f, eight ? 127.0f : 15.0f);
}

static void quantize_group(const KvSide& side, const float* x, uint32_t* codes, uint16_t* scales) {
  const bool eight = side.kind == kKvInt8;
  for (int64_t c = 0; c < side.dim; c += 16) {
    VF low = finite_or_zero(vload(x + c)), high = low, rest = vzero();
    for (int64_t t = 0; t < kKvGroup; ++t) {
      const VF raw = vload(x + t * side.dim + c), v = finite_or_zero(raw);
      rest = vadd(rest, vsub(raw, raw));
      low = vmin(low, v);
      high = vmax(high, v);
    }
    const VF most = vmax(high, vsub(vzero(), low));
    VF range = eight ? vdiv(most, vset(127.0f)) : vdiv(vsub(high, low), vset(15.0f));
    range = choose(finite(rest), range, vset(__builtin_nanf("")));
    vstore_half(scales + c, saturated(range));
    if (!eight) vstore_half(scales + side.dim + c, saturated(low));
    const VF minimum = eight ? vzero() : vload_half(scales + side.dim + c);
    const VF scale = vload_half(scales + c);
    const VF some = vmul(scale, scale);  // 0 only for a scale of 0: fp16 squares fit fp32
    const VF factor = choose(over(some, vzero()), vdiv(vset(1.0f), scale), vmul(scale, vset(0.0f)));
    for (int64_t t = 0; t < kKvGroup; ++t)
      store_codes(codes + t * side.dim + c, finite_or_zero(vload(x + t * side.dim + c)), minimum,
                  factor, eight ? -127.0f : 0.0f, eight ? 127.0f : 15.0f);
  }
}

// e4m3fn, to nearest even; |v| is at most 448 or NaN.
HAL_INLINE uint32_t fp8_code(float v) {
  uint32_t bits;
  __builtin_memcpy(&bits, &v, 4);
  const uint32_t sign = bits >> 24 & 0x80, most = bits & 0x7fffffff;
  if (most > 0x7f800000) return 0x7f;
  if (most < 121u << 23) {  // below 2^-6: steps of 2^-9
    float magnitude;
    __builtin_memcpy(&magnitude, &most, 4);
    return sign | (uint32_t)__builtin_rintf(magnitude * 512.0f);
  }
  const uint32_t rounded = most + 0x7ffff + (most >> 20 & 1);
  return sign | ((rounded >> 20) - (120u << 3));
}

static void quantize_floats(const KvSide& side, const float* x, float factor, uint32_t* codes) {
  const float limit = side.kind == kKvFp8    ? 448.0f
                      : side.kind == kKvFp16 ? 65504.0f
                      : side.kind == kKvBf16 ? 3.3895313892515355e38f
                                             : 3.4028234663852886e38f;
  for (int64_t i = 0; i < side.dim; i += 16) {
    const VF raw = vload(x + i);
    const VF v = vmul(raw, vset(factor));
    float held[16];
    vstore(held, choose(finite(raw), vmin(vset(limit), vmax(vset(-limit), v)), vset(__builtin_nanf(""))));
    uint16_t narrow[16];
    if (side.kind == kKvFp16) vstore_half(narrow, vload(held));
    if (side.kind == kKvBf16) vstore_bf16(narrow, vload(held));
    for (int64_t j = 0; j < 16; ++j) {
      if (side.kind == kKvFp8) codes[i + j] = fp8_code(held[j]);
      else if (side.kind == kKvFp32) __builtin_memcpy(codes + i + j, held + j, 4);
      else codes[i + j] = narrow[j];
    }
  }
}

static void quantize(const KvSide& side, const float* x, float factor, uint32_t* codes, uint16_t* scales) {
  if (side.kind == kKvInt8 || side.kind == kKvInt4) return quantize_integers(side, x, codes, scales);
  quantize_floats(side, x, factor, codes);
}

// The root of the sum of squares, in double: the float is then right to the last place.
static float length_of(const float* x, int64_t dim) {
  double sum = 0;
  for (int64_t i = 0; i < dim; ++i) sum += (double)x[i] * (double)x[i];
  return (float)__builtin_sqrt(sum);
}

static float direction(const float* x, float* unit, int64_t dim) {
  const bool good = all_finite(x, dim);
  const float length = good ? length_of(x, dim) : 0.0f;
  const VF factor = vset(reciprocal(length));
  for (int64_t i = 0; i < dim; i += 16) vstore(unit + i, good ? vmul(vload(x + i), factor) : vzero());
  return good ? length : __builtin_nanf("");
}

static void quantize_rotated(const KvSide& side, const float* rotated, float length, bool correct,
                             uint32_t* codes, uint16_t* scales) {
  const int levels = side.kind == kKvTable2 ? 4 : side.kind == kKvTable3 ? 8 : 16;
  float between[15], centroids[kKvMaxDim];
  for (int i = 0; i + 1 < levels; ++i) between[i] = (side.codebook[i + 1] + side.codebook[i]) * 0.5f;
  for (int64_t i = 0; i < side.dim; i += 16) {
    const VF v = vload(rotated + i);
    VF code = vzero();
    for (int m = 0; m + 1 < levels; ++m)
      code = vadd(code, choose(over(v, vset(between[m])), vset(1.0f), vzero()));
    istore((int32_t*)codes + i, to_int(code));
    for (int64_t j = 0; j < 16; ++j) centroids[i + j] = side.codebook[codes[i + j]];
  }
  float wide;
  scales[0] = stored_half(correct ? length * reciprocal(length_of(centroids, side.dim)) : length, &wide);
}
