// Products of records with matrix tiles: a block of two tiles of weights is expanded once for all
// rows of a band, then 32 rows at a time are multiplied with it. Included inside an anonymous
// namespace, after amx.h, amx_expand.inc.h and vnni_block.inc.h.
//
// Sums of bytes are the same integers as in vnni_block.inc.h, and the roundings that follow are the
// same sequence, so that rows may go either way.

// Fewer rows than this are multiplied by vector instructions, which need no whole tile.
constexpr int64_t kFewRows = 5;

static void amx_enter() {
  TileConfig config = {};
  config.palette = 1;
  for (int i = 0; i < 8; ++i) {
    config.row_bytes[i] = 64;
    config.rows[i] = 16;
  }
  tile_configure(&config);
}
static void amx_leave() { tile_release(); }

enum Multiply { kSignedBytes, kUnsignedBytes, kHalves };

template <Multiply HOW, int C, int A, int B>
HAL_INLINE void multiply() {
  if constexpr (HOW == kSignedBytes) tile_dot_ss<C, A, B>();
  else if constexpr (HOW == kUnsignedBytes) tile_dot_su<C, A, B>();
  else tile_dot_bf16<C, A, B>();
}

// Sums of up to 32 rows with two tiles of weights over `steps` tiles of k: [row half][tile][16][16].
template <Multiply HOW>
static void tile_products(const char* rows, int64_t stride, bool both, const char* weights,
                          int64_t steps, char* sums) {
  const char* second = rows + 16 * stride;
  const char* next = weights + steps * kTileBytes;
  tile_zero<0>(), tile_zero<1>();
  if (both) {
    tile_zero<2>(), tile_zero<3>();
    for (int64_t s = 0; s < steps; ++s) {
      tile_load<4>(rows + s * 64, stride);
      tile_load<6>(weights + s * kTileBytes, 64);
      multiply<HOW, 0, 4, 6>();
      tile_load<7>(next + s * kTileBytes, 64);
      multiply<HOW, 1, 4, 7>();
      tile_load<5>(second + s * 64, stride);
      multiply<HOW, 2, 5, 6>();
      multiply<HOW, 3, 5, 7>();
    }
    tile_store<2>(sums + 2 * kTileBytes, 64), tile_store<3>(sums + 3 * kTileBytes, 64);
  } else {
    for (int64_t s = 0; s < steps; ++s) {
      tile_load<4>(rows + s * 64, stride);
      tile_load<6>(weights + s * kTileBytes, 64);
      multiply<HOW, 0, 4, 6>();
      tile_load<7>(next + s * kTileBytes, 64);
      multiply<HOW, 1, 4, 7>();
    }
  }
  tile_store<0>(sums, 64), tile_store<1>(sums + kTileBytes, 64);
}

// What one block adds to a tile of results: sum * scale, and `shift` times the sum of activations.
struct Addend {
  VF scale, shift;
  VI zero;
};

static Addend addend(const Matrix& m, const Records& f, int64_t tile, int64_t g, VF folded) {
  const int64_t at = (tile * m.groups + g) * kTile;
  Addend a{folded, vzero(), _mm512_setzero_si512()};
  if (f.operand != kInt8Rescaled) a.scale = load_kind(m.scales, m.scale_kind, at);
  const float middle = (float)(1 << (m.bits - 1));
  if (m.zero == kZeroMinimum) {
    a.shift = load_kind(m.mins, m.min_kind, at);
    if (f.operand == kBf16) a.shift = vfma(a.scale, vset(middle), a.shift);
  } else if (m.zero == kZeroInteger && f.operand == kBf16) {
    a.shift = vmul(a.scale, vsub(vset(middle), vload_u8(m.zeros + at)));
  } else if (m.zero == kZeroInteger) {
    a.zero = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(m.zeros + at)));
  }
  return a;
}

// Adds one block's sums [16][16] of `rows` rows to `out`, or begins it.
template <Operand OPERAND, bool SHIFT, bool ZERO>
static void add_sums(const char* sums, const Addend& a, const Records& f, int64_t block, bool first,
                     const char* records, int64_t rows, float* out, int64_t step) {
  for (int64_t r = 0; r < rows; ++r) {
    const char* record = records + r * f.stride;
    const VF total = first ? vzero() : vload(out + r * step);
    VF value;
    VF shifted;
    if constexpr (OPERAND == kBf16) {
      value = vload((const float*)(sums + r * 64));
      if (SHIFT) shifted = _mm512_castsi512_ps(dword(record + f.sums_at + block * 4));
    } else {
      const VF own = _mm512_castsi512_ps(dword(record + f.scales_at + block * 4));
      VI sum = iload((const int32_t*)(sums + r * 64));
      const VI all = SHIFT || ZERO ? dword(record + f.sums_at + block * 4) : sum;
      if (ZERO) sum = _mm512_add_epi32(sum, _mm512_mullo_epi32(a.zero, all));
      if (SHIFT) shifted = vmul(_mm512_cvtepi32_ps(all), own);
      value = vmul(_mm512_cvtepi32_ps(sum), own);
    }
    VF result = vfma(value, a.scale, total);
    if (SHIFT) result = vfma(shifted, a.shift, result);
    vstore(out + r * step, result);
  }
}

// One block of k: `word` to `word + words` of group g.
struct Block {
  int64_t index, g, word, words;
};

template <Operand OPERAND, bool SHIFT, bool ZERO, Multiply HOW>
static void amx_block(const Matrix& m, const Records& f, const Block& b, int64_t tile,
                      int64_t tiles, const VF* folded, const BlockRows& rows, char* weights,
                      float* out, int64_t step) {
  const int64_t per_word = 32 / m.bits, size = OPERAND == kBf16 ? 2 : 1;
  const int64_t steps = (b.words * per_word * size + 63) / 64;
  Addend a[2];
  for (int64_t c = 0; c < 2; ++c) {
    char* to = weights + c * steps * kTileBytes;
    // The second of two tiles may be missing: its sums are of the first and go nowhere.
    const int64_t own = tile + (c < tiles ? c : 0);
    a[c] = addend(m, f, own, b.g, folded[c]);
    if (OPERAND == kBf16) expand_bf16(m, own, b.word, b.words, steps, to);
    else if (OPERAND == kInt8Rescaled)
      expand_folded(m, own, folded[c], b.word, b.words, steps, to);
    else expand_bytes(m, own, b.g, b.word, b.words, steps, to);
  }
  alignas(64) char sums[2][4 * kTileBytes];
  for (int64_t r = 0, turn = 0; r < rows.count; r += 32, ++turn) {
    const char* records = rows.records + r * f.stride;
    char* own = sums[turn & 1];
    const int64_t left = rows.count - r;
    tile_products<HOW>(records + b.word * per_word * size, f.stride, left > 16, weights, steps, own);
    for (int64_t half = 0; half < 2 && half * 16 < left; ++half)
      for (int64_t c = 0; c < tiles; ++c)
        add_sums<OPERAND, SHIFT, ZERO>(own + (half * 2 + c) * kTileBytes, a[c], f, b.index,
                                       b.index == 0, records + half * 16 * f.stride,
                                       left - half * 16 < 16 ? left - half * 16 : 16,
                                       out + (r + half * 16) * step + c * kTile, step);
  }
}

static void amx_any(const Matrix& m, const Records& f, const Block& b, int64_t tile, int64_t tiles,
                    const VF* folded, const BlockRows& rows, char* weights, float* out,
                    int64_t step) {
  const bool shift = m.zero != kZeroNone, minimum = m.zero == kZeroMinimum;
#define HAL_AMX_BLOCK(...) \
  return amx_block<__VA_ARGS__>(m, f, b, tile, tiles, folded, rows, weights, out, step)
  if (f.operand == kBf16) {
    if (shift) HAL_AMX_BLOCK(kBf16, true, false, kHalves);
    HAL_AMX_BLOCK(kBf16, false, false, kHalves);
  }
  if (f.operand == kInt8Rescaled) HAL_AMX_BLOCK(kInt8Rescaled, false, false, kSignedBytes);
  if (m.bits == 8 && minimum) HAL_AMX_BLOCK(kInt8Token, true, false, kUnsignedBytes);
  if (m.bits == 8 && shift) HAL_AMX_BLOCK(kInt8Token, false, true, kUnsignedBytes);
  if (minimum) HAL_AMX_BLOCK(kInt8Token, true, false, kSignedBytes);
  HAL_AMX_BLOCK(kInt8Token, false, false, kSignedBytes);
#undef HAL_AMX_BLOCK
}

// All blocks of up to two tiles for all rows.
static void amx_pair(const Matrix& m, const Records& f, int64_t tile, int64_t tiles,
                     const BlockRows& rows, char* weights, float* out, int64_t step) {
  const int64_t per_word = 32 / m.bits;
  VF folded[2] = {vzero(), vzero()};
  if (f.operand == kInt8Rescaled)
    for (int64_t c = 0; c < tiles; ++c) folded[c] = folded_scale(m, tile + c);
  // Rescaled rows have no groups.
  const int64_t group_words = f.group >= m.k ? m.words : f.group / per_word;
  const int64_t block_words = f.block >= f.group ? group_words : f.block / per_word;
  Block b{0, 0, 0, 0};
  for (int64_t first = 0; first < m.words; first += group_words, ++b.g) {
    const int64_t last = first + group_words < m.words ? first + group_words : m.words;
    for (b.word = first; b.word < last; b.word += block_words, ++b.index) {
      b.words = b.word + block_words < last ? block_words : last - b.word;
      amx_any(m, f, b, tile, tiles, folded, rows, weights, out, step);
    }
  }
}

static void amx_totals(const Matrix& m, const Records& f, int64_t tile, int64_t tiles,
                       const BlockRows& rows, float* out, int64_t step) {
  // One block of two tiles of weights; a block of bf16 is at most kBlock long.
  alignas(64) char weights[2 * kIntegerRun * kTile];
  int64_t most = rows.count;
  if (f.operand == kInt8Token || f.operand == kInt8Group) {
    const int64_t rest = rows.count % 16;
    if (rest < kFewRows) most -= rest;
  }
  for (int64_t c = 0; c < tiles && most; c += 2)
    amx_pair(m, f, tile + c, tiles - c < 2 ? tiles - c : 2, {rows.records, most}, weights,
             out + c * kTile, step);
  if (most < rows.count)
    vnni_totals(m, f, tile, tiles, {rows.records + most * f.stride, rows.count - most},
                out + most * step, step);
}
