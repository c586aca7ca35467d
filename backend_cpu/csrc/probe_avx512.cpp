// The machine's limits with AVX-512 and its dot products.
#include <immintrin.h>

#include "probe.h"

namespace hal_cpu {
namespace {

void fma(int64_t steps, char* scratch) {
  __m512 a[12];
  for (__m512& v : a) v = _mm512_setzero_ps();
  const __m512 x = _mm512_set1_ps(0.5f), y = _mm512_set1_ps(0.25f);
  for (int64_t i = 0; i < steps; ++i) {
#pragma GCC unroll 12
    for (int j = 0; j < 12; ++j) {
      a[j] = _mm512_fmadd_ps(x, y, a[j]);
      __asm__ volatile("" : "+v"(a[j]));
    }
  }
  for (int j = 1; j < 12; ++j) a[0] = _mm512_add_ps(a[0], a[j]);
  _mm512_store_ps(scratch, a[0]);
}

// The dot products are spelled as instructions: this unit may run where only some of them are there.
#define HAL_PROBE_DOT(NAME, INSTRUCTION, CODE)                                                  \
  void NAME(int64_t steps, char* scratch) {                                                     \
    __m512i a[12];                                                                              \
    for (__m512i& v : a) v = _mm512_setzero_si512();                                            \
    const __m512i x = _mm512_set1_epi16(CODE), y = x;                                           \
    for (int64_t i = 0; i < steps; ++i) {                                                       \
      _Pragma("GCC unroll 12") for (int j = 0; j < 12; ++j)                                     \
          __asm__ volatile(INSTRUCTION " %2, %1, %0" : "+v"(a[j]) : "v"(x), "v"(y));            \
    }                                                                                           \
    for (int j = 1; j < 12; ++j) a[0] = _mm512_xor_si512(a[0], a[j]);                           \
    _mm512_store_si512(scratch, a[0]);                                                          \
  }

HAL_PROBE_DOT(bf16_dot, "vdpbf16ps", 0x3f00)  // 0.5: zeros may be quicker than numbers
HAL_PROBE_DOT(int8_dot, "vpdpbusd", 0x0102)

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
