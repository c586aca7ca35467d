// What becomes of the sums of products of a block of k: times its scales, onto the totals. Included
// inside an anonymous namespace, after amx_expand.inc.h and vnni_block.inc.h.
//
// Sums of bytes are the same integers as in vnni_block.inc.h, and the roundings that follow are the
// same sequence, so that rows may go either way.

// What one block adds to a tile of totals: sum * scale, and `shift` times the sum of activations.
struct Addend {
  VF scale, shift;
  VI zero;
};

static Addend addend(const Matrix& m, const Records& f, int64_t tile, int64_t g) {
  const int64_t at = (tile * m.groups + g) * kTile;
  Addend a{load_kind(m.scales, m.scale_kind, at), vzero(), _mm512_setzero_si512()};
  const float middle = (float)(1 << (m.bits - 1));
  if (m.zero == kZeroMinimum) {
    a.shift = load_kind(m.mins, m.min_kind, at);
    if (f.operand == kBf16) a.shift = vfma(a.scale, vset(middle), a.shift);
  } else if (m.zero == kZeroInteger && f.operand == kBf16) {
    a.shift = vmul(a.scale, vsub(vset(middle), vload_u8(m.zeros + at)));
  } else if (m.zero == kZeroInteger) {
    a.zero = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(m.zeros + at)));
  }
  if (in_upper_bits(m, f)) a.scale = vmul(a.scale, vset(1.0f / 16.0f));
  return a;
}

// Fetches the scales of `count` groups from g on, if there are.
static void prefetch_scales(const Matrix& m, int64_t tile, int64_t g, int64_t count) {
  const int64_t size = m.scale_kind == kFloat32 ? 64 : 32, first = (tile * m.groups + g) * size;
  for (int64_t i = 0; i < count; ++i)
    __builtin_prefetch((const char*)m.scales + first + i * size, 0, 2);
}

// The totals of 16 columns of a row with one block's sums.
template <Operand OPERAND, bool SHIFT, bool ZERO>
HAL_INLINE VF add_sum(VF total, const char* sum, const Addend& a, const char* record,
                      const Records& f, int64_t block) {
  VI all = _mm512_setzero_si512();
  if (SHIFT || ZERO) all = dword(record + f.sums_at + block * 4);
  if (OPERAND == kBf16) {
    total = vfma(vload((const float*)sum), a.scale, total);
    return SHIFT ? vfma(_mm512_castsi512_ps(all), a.shift, total) : total;
  }
  VI whole = iload((const int32_t*)sum);
  if (ZERO) whole = _mm512_add_epi32(whole, _mm512_mullo_epi32(a.zero, all));
  VF value = _mm512_cvtepi32_ps(whole), shifted = _mm512_cvtepi32_ps(all);
  if (OPERAND == kInt8Group) {
    const VF own = _mm512_castsi512_ps(dword(record + f.scales_at + block * 4));
    value = vmul(value, own);
    if (SHIFT) shifted = vmul(shifted, own);
  }
  total = vfma(value, a.scale, total);
  return SHIFT ? vfma(shifted, a.shift, total) : total;
}

// Sums of up to 16 rows with one column tile that wait to be added: of blocks [block, block + 1], or
// of the first alone.
struct Waiting {
  const char *sums, *records;
  const Addend* addends;
  float* totals;
  int64_t rows, block;
  bool both;
};

template <Operand OPERAND, bool SHIFT, bool ZERO, bool BOTH>
HAL_INLINE void add_rows(const Waiting& w, int64_t rows, const Records& f, int64_t step) {
  const Addend first = w.addends[0], second = w.addends[BOTH];
#pragma GCC unroll 4
  for (int64_t r = 0; r < rows; ++r) {
    const char* record = w.records + r * f.stride;
    float* to = w.totals + r * step;
    VF total = w.block ? vload(to) : vzero();
    total = add_sum<OPERAND, SHIFT, ZERO>(total, w.sums + r * 64, first, record, f, w.block);
    if (BOTH)
      total = add_sum<OPERAND, SHIFT, ZERO>(total, w.sums + kTileBytes + r * 64, second, record, f,
                                            w.block + 1);
    vstore(to, total);
  }
}

template <Operand OPERAND, bool SHIFT, bool ZERO>
HAL_INLINE void add_waiting(const Waiting& w, const Records& f, int64_t step) {
  if (w.both && w.rows == 16) add_rows<OPERAND, SHIFT, ZERO, true>(w, 16, f, step);
  else if (w.both) add_rows<OPERAND, SHIFT, ZERO, true>(w, w.rows, f, step);
  else if (w.rows == 16) add_rows<OPERAND, SHIFT, ZERO, false>(w, 16, f, step);
  else add_rows<OPERAND, SHIFT, ZERO, false>(w, w.rows, f, step);
}
