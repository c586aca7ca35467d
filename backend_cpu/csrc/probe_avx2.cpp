// The machine's limits with AVX2.
#include <immintrin.h>

#include "probe.h"

namespace hal_cpu {
namespace {

// Twelve chains: a multiply-add takes four cycles and two start in each. The accumulators have names: an array of them would be kept
// in memory, and the stores would be what is measured.
#define HAL_PROBE_TWELVE(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11)
#define HAL_PROBE_ZERO(J) __m256 a##J = _mm256_setzero_ps();
#define HAL_PROBE_FMA(J) __asm__ volatile("vfmadd231ps %2, %1, %0" : "+x"(a##J) : "x"(x), "x"(y));
#define HAL_PROBE_ADD(J) sum = _mm256_add_ps(sum, a##J);

void fma(int64_t steps, char* scratch) {
  HAL_PROBE_TWELVE(HAL_PROBE_ZERO)
  const __m256 x = _mm256_set1_ps(0.5f), y = _mm256_set1_ps(0.25f);
  for (int64_t i = 0; i < steps; ++i) {
    HAL_PROBE_TWELVE(HAL_PROBE_FMA)
  }
  __m256 sum = _mm256_setzero_ps();
  HAL_PROBE_TWELVE(HAL_PROBE_ADD)
  _mm256_store_ps(reinterpret_cast<float*>(scratch), sum);
}

}  // namespace

uint64_t probe_read_avx2(const char* data, size_t bytes, int64_t streams) {
  const size_t run = bytes / static_cast<size_t>(streams);
  __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
  for (size_t i = 0; i < run; i += kProbeLine) {
    for (int64_t s = 0; s < streams; ++s) {
      const auto* p = reinterpret_cast<const __m256i*>(data + static_cast<size_t>(s) * run + i);
      a = _mm256_xor_si256(a, _mm256_loadu_si256(p));
      b = _mm256_xor_si256(b, _mm256_loadu_si256(p + 1));
      c = _mm256_xor_si256(c, _mm256_loadu_si256(p + 2));
      d = _mm256_xor_si256(d, _mm256_loadu_si256(p + 3));
    }
  }
  alignas(32) uint64_t parts[4];
  _mm256_store_si256(reinterpret_cast<__m256i*>(parts), _mm256_xor_si256(_mm256_xor_si256(a, b), _mm256_xor_si256(c, d)));
  return parts[0] ^ parts[1] ^ parts[2] ^ parts[3];
}

extern const PeakProbe kProbeAvx2Fma = {"avx2 fp32 fma", "float", 12 * 8 * 2, fma};

}  // namespace hal_cpu
