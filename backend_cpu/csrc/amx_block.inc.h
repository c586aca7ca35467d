// Products of records with matrix tiles: a block of a few tiles of weights is expanded once for all
// rows of a band, then 16 rows at a time are multiplied with it. Included inside an anonymous
// namespace, after amx.h, amx_expand.inc.h and vnni_block.inc.h.
//
// Sums of bytes are the same integers as in vnni_block.inc.h, and the roundings that follow are the
// same sequence, so that rows may go either way.

// Fewer rows than this are multiplied by vector instructions, which need no whole tile.
constexpr int64_t kFewTileRows = 6;

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

// Loads the B tile of weights and multiplies it with the A tile of rows.
template <Multiply HOW, int C, int B>
HAL_INLINE void tile_step(const char* weights) {
  tile_load<B>(weights, 64);
  multiply<HOW, C, 4, B>();
}

// Sums of 16 rows with `TILES` tiles of weights over `steps` tiles of k: [16][tile][16]. Of the rows
// at `later` it fetches what the next 16 will need.
template <Multiply HOW, int TILES>
HAL_INLINE void tile_products(const char* rows, const char* later, int64_t stride,
                              const char* weights, int64_t steps, char* sums) {
  tile_zero<0>();
  if constexpr (TILES > 1) tile_zero<1>();
  if constexpr (TILES > 2) tile_zero<2>(), tile_zero<3>();
  const int64_t next = steps * kTileBytes;
  for (int64_t s = 0; s < steps; ++s, weights += kTileBytes) {
    tile_load<4>(rows + s * 64, stride);
    for (int64_t r = 0; r < 16; ++r) __builtin_prefetch(later + r * stride + s * 64);
    tile_step<HOW, 0, 5>(weights);
    if constexpr (TILES > 1) tile_step<HOW, 1, 6>(weights + next);
    if constexpr (TILES > 2) {
      tile_step<HOW, 2, 7>(weights + 2 * next);
      tile_step<HOW, 3, 5>(weights + 3 * next);
    }
  }
  tile_store<0>(sums, TILES * 64);
  if constexpr (TILES > 1) tile_store<1>(sums + 64, TILES * 64);
  if constexpr (TILES > 2)
    tile_store<2>(sums + 128, TILES * 64), tile_store<3>(sums + 192, TILES * 64);
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

// Adds `count` rows of one block's sums [16][tile][16] to `out`, or begins it.
template <Operand OPERAND, bool SHIFT, bool ZERO, int TILES>
HAL_INLINE void add_sums(const char* sums, const Addend* a, const Records& f, int64_t block,
                         const char* records, int64_t count, float* out, int64_t step) {
  for (int64_t r = 0; r < count; ++r) {
    const char* record = records + r * f.stride;
    VF own = vzero(), shifted = vzero();
    VI all = _mm512_setzero_si512();
    if (SHIFT || ZERO) all = dword(record + f.sums_at + block * 4);
    if (OPERAND == kBf16) {
      shifted = _mm512_castsi512_ps(all);
    } else {
      own = _mm512_castsi512_ps(dword(record + f.scales_at + block * 4));
      if (SHIFT) shifted = vmul(_mm512_cvtepi32_ps(all), own);
    }
#pragma GCC unroll 4
    for (int c = 0; c < TILES; ++c) {
      const VF total = block ? vload(out + r * step + c * kTile) : vzero();
      VF value;
      if (OPERAND == kBf16) {
        value = vload((const float*)(sums + (r * TILES + c) * 64));
      } else {
        VI sum = iload((const int32_t*)(sums + (r * TILES + c) * 64));
        if (ZERO) sum = _mm512_add_epi32(sum, _mm512_mullo_epi32(a[c].zero, all));
        value = vmul(_mm512_cvtepi32_ps(sum), own);
      }
      VF result = vfma(value, a[c].scale, total);
      if (SHIFT) result = vfma(shifted, a[c].shift, result);
      vstore(out + r * step + c * kTile, result);
    }
  }
}

// One block of k: `word` to `word + words` of group g.
struct Block {
  int64_t index, g, word, words;
};

template <Operand OPERAND, bool SHIFT, bool ZERO, Multiply HOW, int TILES>
static void amx_block(const Matrix& m, const Records& f, const Block& b, int64_t tile,
                      const VF* folded, const BlockRows& rows, char* weights, float* out,
                      int64_t step) {
  const int64_t per_word = 32 / m.bits, size = OPERAND == kBf16 ? 2 : 1;
  const int64_t steps = (b.words * per_word * size + 63) / 64;
  Addend a[TILES];
  for (int c = 0; c < TILES; ++c) {
    char* to = weights + c * steps * kTileBytes;
    a[c] = addend(m, f, tile + c, b.g, folded[c]);
    if (OPERAND == kBf16) expand_bf16(m, tile + c, b.word, b.words, steps, to);
    else if (OPERAND == kInt8Rescaled)
      expand_folded(m, tile + c, folded[c], b.word, b.words, steps, to);
    else expand_bytes(m, tile + c, b.g, b.word, b.words, steps, to);
  }
  // Begins a page, as it did where this was measured.
  alignas(4096) char sums[2][TILES * kTileBytes];
  const char* first = rows.records + b.word * per_word * size;
  const auto add = [&](int64_t r, int64_t count) {
    add_sums<OPERAND, SHIFT, ZERO, TILES>(sums[r / 16 & 1], a, f, b.index,
                                          rows.records + r * f.stride, count, out + r * step, step);
  };
  int64_t r = 0;
  for (; r < rows.count; r += 16) {
    const char* own = first + r * f.stride;
    // Behind the last rows come the first ones, a block later.
    const char* later = r + 16 < rows.count ? own + 16 * f.stride : first + steps * 64;
    tile_products<HOW, TILES>(own, later, f.stride, weights, steps, sums[r / 16 & 1]);
    // While the tiles multiply these rows, the sums of those before are added. Measured: adding a few
    // rows after each product instead takes a twelfth longer.
    if (r) add(r - 16, 16);
  }
  add(r - 16, rows.count - (r - 16));
}

template <int TILES>
static void amx_any(const Matrix& m, const Records& f, const Block& b, int64_t tile,
                    const VF* folded, const BlockRows& rows, char* weights, float* out,
                    int64_t step) {
  const bool shift = m.zero != kZeroNone, minimum = m.zero == kZeroMinimum;
#define HAL_AMX_BLOCK(...) \
  return amx_block<__VA_ARGS__, TILES>(m, f, b, tile, folded, rows, weights, out, step)
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

// All blocks of TILES tiles for all rows.
template <int TILES>
static void amx_tiles(const Matrix& m, const Records& f, int64_t tile, const BlockRows& rows,
                      float* out, int64_t step) {
  alignas(64) char weights[TILES * kIntegerRun * kTile];
  const int64_t per_word = 32 / m.bits;
  VF folded[TILES];
  for (int c = 0; c < TILES; ++c)
    folded[c] = f.operand == kInt8Rescaled ? folded_scale(m, tile + c) : vzero();
  // Rescaled rows have no groups.
  const int64_t group_words = f.group >= m.k ? m.words : f.group / per_word;
  const int64_t block_words = f.block >= f.group ? group_words : f.block / per_word;
  Block b{0, 0, 0, 0};
  for (int64_t first = 0; first < m.words; first += group_words, ++b.g) {
    const int64_t last = first + group_words < m.words ? first + group_words : m.words;
    for (b.word = first; b.word < last; b.word += block_words, ++b.index) {
      b.words = b.word + block_words < last ? block_words : last - b.word;
      amx_any<TILES>(m, f, b, tile, folded, rows, weights, out, step);
    }
  }
}

static void amx_totals(const Matrix& m, const Records& f, int64_t tile, int64_t tiles,
                       const BlockRows& rows, float* out, int64_t step) {
  int64_t most = rows.count;
  if (f.operand == kInt8Token || f.operand == kInt8Group) {
    const int64_t rest = rows.count % 16;
    if (rest < kFewTileRows) most -= rest;
  }
  const BlockRows all{rows.records, most};
  for (int64_t c = 0; c < tiles && most;) {
    float* to = out + c * kTile;
    if (tiles - c >= 4) amx_tiles<4>(m, f, tile + c, all, to, step), c += 4;
    else if (tiles - c >= 2) amx_tiles<2>(m, f, tile + c, all, to, step), c += 2;
    else amx_tiles<1>(m, f, tile + c, all, to, step), c += 1;
  }
  if (most < rows.count)
    vnni_totals(m, f, tile, tiles, {rows.records + most * f.stride, rows.count - most},
                out + most * step, step);
}
