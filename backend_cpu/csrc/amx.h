// The matrix tile instructions, or with HAL_AMX_EMULATED the same on plain memory, so that what is
// built on them can be tested on a processor without. Included inside an anonymous namespace.
//
// Written as assembly: gcc's own intrinsics of tile loads do not say that they read memory, and
// gcc 12's of the configuration says it of 8 bytes out of 64, so that stores before them may move
// or vanish.

struct TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

#ifdef HAL_AMX_EMULATED

struct EmulatedTiles {
  TileConfig config;
  alignas(64) uint8_t data[8][16][64];
};
static thread_local EmulatedTiles tiles_state;

// The instruction faults on a tile that is not configured; a null write stops a test as surely.
static void need_tile(int t) {
  if (!tiles_state.config.palette || !tiles_state.config.rows[t]) __builtin_trap();
}
static void tile_configure(const TileConfig* config) {
  __builtin_memset(&tiles_state, 0, sizeof tiles_state);
  tiles_state.config = *config;
}
static void tile_release() { __builtin_memset(&tiles_state, 0, sizeof tiles_state); }
template <int T>
static void tile_zero() {
  need_tile(T);
  __builtin_memset(tiles_state.data[T], 0, sizeof tiles_state.data[T]);
}
template <int T>
static void tile_load(const void* base, int64_t stride) {
  tile_zero<T>();
  for (int r = 0; r < tiles_state.config.rows[T]; ++r)
    __builtin_memcpy(tiles_state.data[T][r], (const char*)base + r * stride,
                     tiles_state.config.row_bytes[T]);
}
template <int T>
static void tile_store(void* base, int64_t stride) {
  need_tile(T);
  for (int r = 0; r < tiles_state.config.rows[T]; ++r)
    __builtin_memcpy((char*)base + r * stride, tiles_state.data[T][r],
                     tiles_state.config.row_bytes[T]);
}
template <int C, int A, int B, class TA, class TB>
static void tile_dot_bytes() {
  need_tile(C), need_tile(A), need_tile(B);
  for (int r = 0; r < tiles_state.config.rows[A]; ++r)
    for (int n = 0; n < 16; ++n) {
      int32_t sum;
      __builtin_memcpy(&sum, &tiles_state.data[C][r][n * 4], 4);
      for (int k = 0; k < tiles_state.config.rows[B]; ++k)
        for (int i = 0; i < 4; ++i)
          sum += (int32_t)(TA)tiles_state.data[A][r][k * 4 + i] *
                 (int32_t)(TB)tiles_state.data[B][k][n * 4 + i];
      __builtin_memcpy(&tiles_state.data[C][r][n * 4], &sum, 4);
    }
}
template <int C, int A, int B>
static void tile_dot_ss() { tile_dot_bytes<C, A, B, int8_t, int8_t>(); }
template <int C, int A, int B>
static void tile_dot_su() { tile_dot_bytes<C, A, B, int8_t, uint8_t>(); }
template <int C, int A, int B>
static void tile_dot_bf16() {
  need_tile(C), need_tile(A), need_tile(B);
  const auto wide = [](const uint8_t* p) {
    const uint32_t bits = (uint32_t)p[0] << 16 | (uint32_t)p[1] << 24;
    float v;
    __builtin_memcpy(&v, &bits, 4);
    return v;
  };
  for (int r = 0; r < tiles_state.config.rows[A]; ++r)
    for (int n = 0; n < 16; ++n) {
      float sum;
      __builtin_memcpy(&sum, &tiles_state.data[C][r][n * 4], 4);
      for (int k = 0; k < tiles_state.config.rows[B]; ++k)
        for (int i = 0; i < 2; ++i)
          sum += wide(&tiles_state.data[A][r][k * 4 + i * 2]) *
                 wide(&tiles_state.data[B][k][n * 4 + i * 2]);
      __builtin_memcpy(&tiles_state.data[C][r][n * 4], &sum, 4);
    }
}

#else

static void tile_configure(const TileConfig* config) {
  __asm__ volatile("ldtilecfg %0" ::"m"(*config) : "memory");
}
static void tile_release() { __asm__ volatile("tilerelease" ::: "memory"); }
template <int T>
HAL_INLINE void tile_zero() {
  __asm__ volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int T>
HAL_INLINE void tile_load(const void* base, int64_t stride) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(base), "r"(stride), "i"(T) : "memory");
}
template <int T>
HAL_INLINE void tile_store(void* base, int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(base), "r"(stride), "i"(T) : "memory");
}
template <int C, int A, int B>
HAL_INLINE void tile_dot_ss() {
  __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
// The rows of A are signed, those of B are not.
template <int C, int A, int B>
HAL_INLINE void tile_dot_su() {
  __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
template <int C, int A, int B>
HAL_INLINE void tile_dot_bf16() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

#endif
