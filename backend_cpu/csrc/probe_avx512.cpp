// The machine's limits with AVX-512 and its dot products.
#include <immintrin.h>

#include "probe.h"

namespace hal_cpu {
namespace {

// Twelve accumulators with names: an array of them would be kept in memory, and the stores would be what is measured. The dot
// products are spelled as instructions, since this unit is built without them and runs where only some of them are there.
#define HAL_PROBE_TWELVE(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11)
#define HAL_PROBE_ZERO(J) __m512i a##J = _mm512_setzero_si512();
#define HAL_PROBE_XOR(J) sum = _mm512_xor_si512(sum, a##J);
#define HAL_PROBE_LOOP(NAME, STEP, OPERAND)                  \
  void NAME(int64_t steps, char* scratch) {                  \
    HAL_PROBE_TWELVE(HAL_PROBE_ZERO)                         \
    const __m512i x = OPERAND, y = x;                        \
    for (int64_t i = 0; i < steps; ++i) {                    \
      HAL_PROBE_TWELVE(STEP)                                 \
    }                                                        \
    __m512i sum = _mm512_setzero_si512();                    \
    HAL_PROBE_TWELVE(HAL_PROBE_XOR)                          \
    _mm512_store_si512(scratch, sum);                        \
  }
#define HAL_PROBE_FMA(J) __asm__ volatile("vfmadd231ps %2, %1, %0" : "+v"(a##J) : "v"(x), "v"(y));
#define HAL_PROBE_BF16(J) __asm__ volatile("vdpbf16ps %2, %1, %0" : "+v"(a##J) : "v"(x), "v"(y));
#define HAL_PROBE_INT8(J) __asm__ volatile("vpdpbusd %2, %1, %0" : "+v"(a##J) : "v"(x), "v"(y));

HAL_PROBE_LOOP(fma, HAL_PROBE_FMA, _mm512_castps_si512(_mm512_set1_ps(0.5f)))
HAL_PROBE_LOOP(bf16_dot, HAL_PROBE_BF16, _mm512_set1_epi16(0x3f00))  // 0.5: zeros may be quicker than numbers
HAL_PROBE_LOOP(int8_dot, HAL_PROBE_INT8, _mm512_set1_epi16(0x0102))

}  // namespace

uint64_t probe_read_avx512(const char* data, size_t bytes, int64_t streams) {
  const size_t run = bytes / static_cast<size_t>(streams);
  __m512i a = _mm512_setzero_si512(), b = a;
  for (size_t i = 0; i < run; i += kProbeLine) {
    for (int64_t s = 0; s < streams; ++s) {
      const char* p = data + static_cast<size_t>(s) * run + i;
      a = _mm512_xor_si512(a, _mm512_loadu_si512(p));
      b = _mm512_xor_si512(b, _mm512_loadu_si512(p + 64));
    }
  }
  alignas(64) uint64_t parts[8];
  _mm512_store_si512(parts, _mm512_xor_si512(a, b));
  uint64_t sum = 0;
  for (const uint64_t part : parts) sum ^= part;
  return sum;
}

extern const PeakProbe kProbeAvx512Fma = {"avx512 fp32 fma", "float", 12 * 16 * 2, fma};
extern const PeakProbe kProbeAvx512Bf16 = {"avx512 bf16 dot", "float", 12 * 32 * 2, bf16_dot};
extern const PeakProbe kProbeAvx512Vnni = {"avx512 vnni int8 dot", "int8", 12 * 64 * 2, int8_dot};

}  // namespace hal_cpu
