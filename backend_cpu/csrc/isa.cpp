#include "isa.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "error.h"

namespace hal_cpu {
namespace {

constexpr Isa kLevels[] = {Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Vnni, Isa::kAvx512Bf16,
                           Isa::kAmx};
constexpr const char* kNames = "avx2, avx512, avx512vnni, avx512bf16 or amx";

// The register state the operating system saves; reading it needs OSXSAVE.
unsigned long long saved_state() {
  unsigned eax, edx;
  // Spelled in bytes, since the mnemonic needs -mxsave and this unit is built for any x86-64.
  __asm__ volatile(".byte 0x0f, 0x01, 0xd0" : "=a"(eax), "=d"(edx) : "c"(0));
  return (static_cast<unsigned long long>(edx) << 32) | eax;
}

// Linux grants the tiles' large register state to a process that asks; the first tile instruction
// without it is fatal.
bool tiles_permitted() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

Isa measure() {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return Isa::kNone;
  const bool osxsave = c & (1u << 27), avx = c & (1u << 28), fma = c & (1u << 12),
             f16c = c & (1u << 29);
  if (!osxsave || !avx || !fma || !f16c) return Isa::kNone;
  const unsigned long long state = saved_state();
  if ((state & 0x6) != 0x6) return Isa::kNone;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return Isa::kNone;
  if (!(b & (1u << 5))) return Isa::kNone;
  const unsigned wanted = (1u << 16) | (1u << 17) | (1u << 30) | (1u << 31);  // F DQ BW VL
  if ((b & wanted) != wanted || (state & 0xe6) != 0xe6) return Isa::kAvx2;
  if (!(c & (1u << 11))) return Isa::kAvx512;
  if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a & (1u << 5))) return Isa::kAvx512Vnni;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return Isa::kAvx512Bf16;
  const unsigned tiles = (1u << 22) | (1u << 24) | (1u << 25);  // bf16, tiles, int8
  if ((d & tiles) != tiles || (state & 0x60000) != 0x60000 || !tiles_permitted())
    return Isa::kAvx512Bf16;
  return Isa::kAmx;
}

// Intel's cores start a bf16 dot product every second cycle but two fp32 multiply-adds each one.
bool slow_bf16() {
  unsigned a, b, c, d;
  return __get_cpuid(0, &a, &b, &c, &d) && b == signature_INTEL_ebx && c == signature_INTEL_ecx &&
         d == signature_INTEL_edx;
}

bool parse(std::string_view name, Isa* isa) {
  for (Isa level : kLevels) {
    if (name == isa_name(level)) {
      *isa = level;
      return true;
    }
  }
  return false;
}

struct Usable {
  Isa measured = measure();
  Isa isa = measured;
  std::string bad_setting;

  Usable() {
    const char* setting = std::getenv("HAL_CPU_ISA");
    if (!setting || !*setting) return;
    Isa asked;
    if (!parse(setting, &asked)) bad_setting = setting;
    else if (asked < isa) isa = asked;
  }
};

const Usable& usable() {
  static const Usable value;
  return value;
}

}  // namespace

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAvx512Vnni:
      return "avx512vnni";
    case Isa::kAvx512Bf16:
      return "avx512bf16";
    case Isa::kAmx:
      return "amx";
    default:
      return "none";
  }
}

Isa usable_isa() {
  const Usable& value = usable();
  if (!value.bad_setting.empty())
    fail("HAL_CPU_ISA is '", value.bad_setting, "'; it takes ", kNames);
  return value.isa;
}

Isa preferred_isa() {
  static const bool slow = slow_bf16();
  const Isa best = usable_isa();
  if (best < Isa::kAvx512Vnni) return best;
  return best == Isa::kAvx512Vnni || slow ? Isa::kAvx512 : Isa::kAvx512Bf16;
}

void require_isa(Isa isa) {
  const Isa best = usable_isa();
  if (isa > best)
    fail("isa '", isa_name(isa), "' is above the usable '", isa_name(best),
         "' (the CPU and operating system offer ", isa_name(usable().measured),
         best == usable().measured ? ")" : ", lowered by HAL_CPU_ISA)");
}

const Kernels& kernels_for(std::string_view name) {
  Isa isa = preferred_isa();
  if (name != "auto" && !parse(name, &isa))
    fail("isa is '", std::string(name), "'; it takes ", kNames, ", or auto");
  require_isa(isa);
  if (isa == Isa::kNone) fail("this CPU or operating system does not offer AVX2, FMA and F16C");
  if (isa >= Isa::kAvx512Bf16) return kKernelsAvx512Bf16;
  return isa >= Isa::kAvx512 ? kKernelsAvx512 : kKernelsAvx2;
}

}  // namespace hal_cpu
