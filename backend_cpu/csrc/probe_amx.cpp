// The machine's limits with AMX: four accumulators over two and two operand tiles, all kept in registers.
#include <immintrin.h>

#include "probe.h"

namespace hal_cpu {
namespace {

struct TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

void configure() {
  TileConfig config = {};
  config.palette = 1;
  for (int i = 0; i < 8; ++i) {
    config.row_bytes[i] = 64;
    config.rows[i] = 16;
  }
  // gcc 12 tells the compiler of eight bytes that the instruction reads, so the other stores could be dropped.
  __asm__ volatile("" ::"r"(&config) : "memory");
  _tile_loadconfig(&config);
}

#define HAL_PROBE_TILES(NAME, MULTIPLY)                \
  void NAME(int64_t steps, char* scratch) {            \
    configure();                                       \
    _tile_zero(0);                                     \
    _tile_zero(1);                                     \
    _tile_zero(2);                                     \
    _tile_zero(3);                                     \
    _tile_loadd(4, scratch, 64);                       \
    _tile_loadd(5, scratch + 1024, 64);                \
    _tile_loadd(6, scratch + 2048, 64);                \
    _tile_loadd(7, scratch + 3072, 64);                \
    for (int64_t i = 0; i < steps; ++i) {              \
      MULTIPLY(0, 4, 6);                               \
      MULTIPLY(1, 4, 7);                               \
      MULTIPLY(2, 5, 6);                               \
      MULTIPLY(3, 5, 7);                               \
    }                                                  \
    _tile_stored(0, scratch + 4096, 64);               \
    _tile_stored(1, scratch + 4096 + 1024, 64);        \
    _tile_stored(2, scratch + 4096 + 2048, 64);        \
    _tile_stored(3, scratch + 4096 + 3072, 64);        \
    _tile_release();                                   \
  }

HAL_PROBE_TILES(int8_tiles, _tile_dpbssd)
HAL_PROBE_TILES(bf16_tiles, _tile_dpbf16ps)

}  // namespace

extern const PeakProbe kProbeAmxBf16 = {"amx bf16", "float", 4 * 16 * 16 * 32 * 2, bf16_tiles};
extern const PeakProbe kProbeAmxInt8 = {"amx int8", "int8", 4 * 16 * 16 * 64 * 2, int8_tiles};

}  // namespace hal_cpu
