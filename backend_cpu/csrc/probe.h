// What the machine can do at most, measured: reading memory, and arithmetic out of registers. `hal bench` runs these beside kernels.
// As in kernels.h, nothing here may define an inline function or a template.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace hal_cpu {

// One instruction repeated on independent registers. `run` does `steps` rounds of `ops_per_step` operations (a multiply and an
// add count as two); `scratch` is 64 byte aligned and holds kProbeScratch bytes.
struct PeakProbe {
  const char* name;
  const char* kind;  // "float" or "int8": what kernels compute with
  int64_t ops_per_step;
  void (*run)(int64_t steps, char* scratch);
};

constexpr size_t kProbeScratch = 8192;
// Bytes that a read takes at once from each of its streams.
constexpr size_t kProbeLine = 128;

// XOR of all bytes from `data`, read as `streams` runs side by side; `bytes` is a multiple of streams * kProbeLine.
uint64_t probe_read_avx2(const char* data, size_t bytes, int64_t streams);
uint64_t probe_read_avx512(const char* data, size_t bytes, int64_t streams);

extern const PeakProbe kProbeAvx2Fma;
extern const PeakProbe kProbeAvx512Fma;
extern const PeakProbe kProbeAvx512Bf16;
extern const PeakProbe kProbeAvx512Vnni;
extern const PeakProbe kProbeAmxBf16;
extern const PeakProbe kProbeAmxInt8;

}  // namespace hal_cpu
