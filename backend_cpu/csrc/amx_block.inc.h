// Products of records with matrix tiles: a chunk of k of a few column tiles is expanded once for all
// rows of a band, then 16 rows at a time stay in four tiles while the columns pass. Included inside an
// anonymous namespace, after amx_sums.inc.h.

// Fewer rows than this are multiplied by vector instructions, which need no whole tile.
constexpr int64_t kFewTileRows = 6;

// Tiles of k that 16 rows fill at once.
constexpr int64_t kDepth = 4;

static void amx_leave() { tile_release(); }

// Tiles 0 and 1 are sums, 2 and 3 weights, 4 to 7 rows, of which each takes `run` bytes of k.
static void amx_configure(int64_t run) {
  TileConfig config = {};
  config.palette = 1;
  for (int i = 0; i < 8; ++i) {
    config.row_bytes[i] = i < 4 ? 64 : (uint16_t)run;
    config.rows[i] = i == 2 || i == 3 ? (uint8_t)(run / 4) : 16;
  }
  tile_configure(&config);
}

enum Multiply { kSignedBytes, kUnsignedBytes, kHalves };

template <Multiply HOW, int C, int A, int B>
HAL_INLINE void multiply() {
  if constexpr (HOW == kSignedBytes) tile_dot_ss<C, A, B>();
  else if constexpr (HOW == kUnsignedBytes) tile_dot_su<C, A, B>();
  else tile_dot_bf16<C, A, B>();
}

template <Multiply HOW, int C, int I>
HAL_INLINE void tile_step(const char* weights) {
  constexpr int B = 2 + (I & 1);
  tile_load<B>(weights + I * kTileBytes, 64);
  multiply<HOW, C, 4 + I, B>();
}

// Adds the products of the chunk's block J, of STEPS tiles of k, to tile J & 1.
template <Multiply HOW, int STEPS, int J>
HAL_INLINE void block_products(const char* weights) {
  constexpr int C = J & 1, I = J * STEPS;
  tile_step<HOW, C, I>(weights);
  if constexpr (STEPS > 1) tile_step<HOW, C, I + 1>(weights);
  if constexpr (STEPS > 2) tile_step<HOW, C, I + 2>(weights);
  if constexpr (STEPS > 3) tile_step<HOW, C, I + 3>(weights);
}

// How k is cut: blocks, which have one sum each, and chunks of as many as kDepth tiles hold.
struct Cut {
  int64_t word_bytes;  // of the operands that one word of codes multiplies
  int64_t group_words, block_words;
  int64_t run;  // bytes of a block
  int64_t steps, blocks;
};

static Cut cut_of(const Matrix& m, const Records& f) {
  const int64_t per_word = 32 / m.bits;
  Cut c{};
  c.word_bytes = f.operand == kBf16 ? 2 * per_word : per_word;
  c.group_words = f.group >= m.k ? m.words : f.group / per_word;
  c.block_words = f.block >= f.group ? c.group_words : f.block / per_word;
  c.run = c.block_words * c.word_bytes;
  c.steps = (c.run + 63) / 64;
  c.blocks = kDepth / c.steps;
  return c;
}

struct Block {
  int64_t g, word, words;  // of group g
};

// The blocks of a chunk: `first` of all blocks and what follows. `at`: where its tiles begin in a row,
// in bytes.
struct Chunk {
  int64_t first, count, tiles;
  Block blocks[kDepth];
  int64_t at[kDepth];

  int64_t end() const { return blocks[count - 1].word + blocks[count - 1].words; }
};

// The chunk that begins with block `first`, at `word`.
static Chunk chunk_at(const Matrix& m, const Cut& cut, int64_t first, int64_t word) {
  Chunk c{first, 0, 0, {}, {}};
  for (; c.count < cut.blocks && word < m.words; ++c.count) {
    const int64_t g = word / cut.group_words, group_end = (g + 1) * cut.group_words;
    const int64_t last = group_end < m.words ? group_end : m.words;
    const int64_t words = word + cut.block_words < last ? cut.block_words : last - word;
    c.blocks[c.count] = {g, word, words};
    // Where a short block has no operands the weights are zero, and any others of it will do.
    for (int64_t i = 0; i < cut.steps; ++i)
      c.at[c.tiles++] = word * cut.word_bytes + (i * 64 < words * cut.word_bytes ? i * 64 : 0);
    word += words;
  }
  return c;
}

// Column tiles [tile, tile + count) for all rows, and where their totals go.
struct Columns {
  const Matrix& m;
  const Records& f;
  const Cut& cut;
  const BlockRows& rows;
  int64_t tile, count;
  float* out;
  int64_t step;
};

// What the products of a chunk read, and the sums of up to two blocks of a column, of two columns in
// turn.
struct Work {
  alignas(4096) char weights[kTilesPerCall][kDepth * kTileBytes];
  alignas(4096) char sums[2][2 * kTileBytes];
  Addend addends[kTilesPerCall][kDepth];
  VF folded[kTilesPerCall];
};

static void expand_block(const Columns& s, const Block& b, int64_t c, int64_t at, Work& work) {
  const bool whole = s.cut.run >= 64;
  expand(s.m, s.f, s.tile + c, b.g, work.folded[c], b.word, b.words,
         whole ? s.cut.steps * kTileBytes : s.cut.run * 16, work.weights[c] + at * kTileBytes);
}

static void expand_chunk(const Columns& s, const Chunk& chunk, Work& work) {
  for (int64_t c = 0; c < s.count; ++c) {
    prefetch_scales(s.m, s.tile + c, chunk.blocks[chunk.count - 1].g + 1, chunk.count);
    for (int64_t j = 0; j < chunk.count; ++j) {
      const Block& b = chunk.blocks[j];
      if (s.f.operand != kInt8Rescaled) work.addends[c][j] = addend(s.m, s.f, s.tile + c, b.g);
      expand_block(s, b, c, j * s.cut.steps, work);
    }
  }
}

// The codes that are expanded next, of every column: `lines` lines, a share of them for each 16 rows,
// since more at once would hold up whatever else reads memory.
struct Ahead {
  const char* codes;
  int64_t stride, lines, share;
};

static Ahead ahead_of(const Columns& s, const Chunk& chunk) {
  const int64_t words = s.m.words, most = s.cut.blocks * s.cut.block_words;
  const bool done = chunk.end() == words;
  const int64_t word = done ? 0 : chunk.end(), tile = done ? s.tile + s.count : s.tile;
  const int64_t lines = word + most < words ? most : words - word;
  const int64_t row_tiles = (s.rows.count + 15) / 16;
  return {(const char*)(s.m.codes + (tile * words + word) * kTile), words * 64, lines,
          (lines + row_tiles - 1) / row_tiles};
}

HAL_INLINE void fetch(const Ahead& a, int64_t column, int64_t row_tile) {
  const int64_t first = row_tile * a.share, left = a.lines - first;
  const char* at = a.codes + column * a.stride + first * 64;
  for (int64_t i = 0; i < (left < a.share ? left : a.share); ++i)
    __builtin_prefetch(at + i * 64, 0, 2);
}

// 16 rows of the chunk into tiles 4 to 7. Beyond a block's end are other operands: their weights are
// zero.
HAL_INLINE void load_rows(const char* rows, int64_t stride, const int64_t* at, int64_t tiles) {
  tile_load<4>(rows + at[0], stride);
  if (tiles > 1) tile_load<5>(rows + at[1], stride);
  if (tiles > 2) tile_load<6>(rows + at[2], stride);
  if (tiles > 3) tile_load<7>(rows + at[3], stride);
}

// The products of blocks J and, if `both`, J + 1 of the chunk, into tiles 0 and 1.
template <Multiply HOW, int STEPS, int J>
HAL_INLINE void pair_products(const char* weights, bool both) {
  tile_zero<0>();
  block_products<HOW, STEPS, J>(weights);
  if constexpr ((J + 2) * STEPS <= kDepth) {
    if (!both) return;
    tile_zero<1>();
    block_products<HOW, STEPS, J + 1>(weights);
  }
}

// What the loops over rows and columns need is copied out of memory first: there, a load whose address
// ends like that of a store of sums waits for their products.
template <Operand OPERAND, bool SHIFT, bool ZERO, Multiply HOW, int STEPS>
static void chunk_sums(const Columns& s, const Chunk& chunk, const Ahead& next, Work& work) {
  const Ahead ahead = next;
  const Records f = s.f;
  const int64_t rows = s.rows.count, columns = s.count, step = s.step, first = chunk.first;
  const int64_t blocks = chunk.count, tiles = chunk.tiles;
  const int64_t at[kDepth] = {chunk.at[0], chunk.at[1], chunk.at[2], chunk.at[3]};
  const char* const records = s.rows.records;
  float* const out = s.out;

  Waiting waiting{};
  int64_t turn = 0;
  const auto pass = [&]<int J>(int64_t r, int64_t c) __attribute__((always_inline)) {
    const bool both = (J + 2) * STEPS <= kDepth && J + 1 < blocks;
    char* const sums = work.sums[turn & 1];
    pair_products<HOW, STEPS, J>(work.weights[c], both);
    tile_store<0>(sums, 64);
    if (both) tile_store<1>(sums + kTileBytes, 64);
    // While the tiles multiply, the sums before these are added.
    if (turn++) add_waiting<OPERAND, SHIFT, ZERO>(waiting, f, step);
    waiting = {sums, records + r * f.stride, work.addends[c] + J, out + r * step + c * kTile,
               rows - r < 16 ? rows - r : 16, first + J, both};
  };
  for (int64_t r = 0; r < rows; r += 16) {
    load_rows(records + r * f.stride, f.stride, at, tiles);
    for (int64_t c = 0; c < columns; ++c) {
      fetch(ahead, c, r / 16);
      pass.template operator()<0>(r, c);
      if constexpr (STEPS == 1) {
        if (blocks > 2) pass.template operator()<2>(r, c);
      }
    }
  }
  add_waiting<OPERAND, SHIFT, ZERO>(waiting, f, step);
}

// Rescaled weights have one scale a row: sums add up as integers, 16 rows of a column in one tile.
template <int STEPS>
static void chunk_folded(const Columns& s, const Chunk& chunk, const Ahead& next, Work& work) {
  const Ahead ahead = next;
  const int64_t rows = s.rows.count, columns = s.count, stride = s.f.stride, step = s.step;
  const int64_t at[kDepth] = {chunk.at[0], chunk.at[1], chunk.at[2], chunk.at[3]};
  const char* const records = s.rows.records;
  float* const out = s.out;
  const bool begin = chunk.first == 0;
  for (int64_t r = 0; r < rows; r += 16) {
    load_rows(records + r * stride, stride, at, STEPS);
    for (int64_t c = 0; c < columns; ++c) {
      fetch(ahead, c, r / 16);
      char* const total = (char*)(out + r * step + c * kTile);
      if (begin) tile_zero<0>();
      else tile_load<0>(total, step * 4);
      block_products<kSignedBytes, STEPS, 0>(work.weights[c]);
      tile_store<0>(total, step * 4);
    }
  }
}

template <int STEPS>
static void chunk_products(const Columns& s, const Chunk& chunk, const Ahead& ahead, Work& work) {
  const Matrix& m = s.m;
  const bool shift = m.zero != kZeroNone, minimum = m.zero == kZeroMinimum;
  const Operand operand = s.f.operand;
  if (operand == kInt8Rescaled) return chunk_folded<STEPS>(s, chunk, ahead, work);
#define HAL_AMX_CHUNK(...) return chunk_sums<__VA_ARGS__, STEPS>(s, chunk, ahead, work)
#define HAL_AMX_BYTES(OPERAND)                                                     \
  if (m.bits == 8 && minimum) HAL_AMX_CHUNK(OPERAND, true, false, kUnsignedBytes); \
  if (m.bits == 8 && shift) HAL_AMX_CHUNK(OPERAND, false, true, kUnsignedBytes);   \
  if (minimum) HAL_AMX_CHUNK(OPERAND, true, false, kSignedBytes);                  \
  HAL_AMX_CHUNK(OPERAND, false, false, kSignedBytes)
  if (operand == kBf16 && shift) HAL_AMX_CHUNK(kBf16, true, false, kHalves);
  if (operand == kBf16) HAL_AMX_CHUNK(kBf16, false, false, kHalves);
  if (operand == kInt8Group) { HAL_AMX_BYTES(kInt8Group); }
  HAL_AMX_BYTES(kInt8Token);
#undef HAL_AMX_BYTES
#undef HAL_AMX_CHUNK
}

// Multiplies the totals with what is the same for a whole row.
static void scale_totals(const Columns& s, const VF* folded) {
  const bool fold = s.f.operand == kInt8Rescaled;
  if (!fold && s.f.operand != kInt8Token) return;
  for (int64_t r = 0; r < s.rows.count; ++r) {
    const VF own = _mm512_castsi512_ps(dword(s.rows.records + r * s.f.stride + s.f.scales_at));
    for (int64_t c = 0; c < s.count; ++c) {
      float* at = s.out + r * s.step + c * kTile;
      const VF total =
          fold ? vmul(_mm512_cvtepi32_ps(iload((const int32_t*)at)), folded[c]) : vload(at);
      vstore(at, vmul(total, own));
    }
  }
}

static void amx_columns(const Columns& s) {
  Work work;
  for (int64_t c = 0; c < s.count; ++c)
    work.folded[c] = s.f.operand == kInt8Rescaled ? folded_scale(s.m, s.tile + c) : vzero();
  amx_configure(s.cut.run < 64 ? s.cut.run : 64);
  for (int64_t word = 0, block = 0; word < s.m.words;) {
    const Chunk chunk = chunk_at(s.m, s.cut, block, word);
    expand_chunk(s, chunk, work);
    const Ahead ahead = ahead_of(s, chunk);
    if (s.cut.steps == 1) chunk_products<1>(s, chunk, ahead, work);
    else if (s.cut.steps == 2) chunk_products<2>(s, chunk, ahead, work);
    else if (s.cut.steps == 3) chunk_products<3>(s, chunk, ahead, work);
    else chunk_products<4>(s, chunk, ahead, work);
    word = chunk.end(), block += chunk.count;
  }
  scale_totals(s, work.folded);
}

static void amx_totals(const Matrix& m, const Records& f, int64_t tile, int64_t tiles,
                       const BlockRows& rows, float* out, int64_t step) {
  int64_t most = rows.count;
  if (f.operand == kInt8Token || f.operand == kInt8Group) {
    const int64_t rest = rows.count % 16;
    if (rest < kFewTileRows) most -= rest;
  }
  if (most) {
    const Cut cut = cut_of(m, f);
    amx_columns({m, f, cut, {rows.records, most}, tile, tiles, out, step});
  }
  if (most < rows.count)
    vnni_totals(m, f, tile, tiles, {rows.records + most * f.stride, rows.count - most},
                out + most * step, step);
}
