// Which instruction set this process may use, decided once.
#pragma once
#include <string_view>

#include "kernels.h"

namespace hal_cpu {

// In rising order; a level needs all below it. Levels for VNNI and AMX belong above kAvx512: the
// packed layout already gives them whole quads of k per column.
enum class Isa : int { kNone = 0, kAvx2 = 1, kAvx512 = 2, kAvx512Bf16 = 3 };

const char* isa_name(Isa isa);

// What CPUID offers and the operating system has enabled, lowered by HAL_CPU_ISA. Throws if that
// variable names no level.
Isa usable_isa();

// What "auto" means: the usable level that is fastest on this vendor's cores.
Isa preferred_isa();

// The kernels of level `name`. Throws if the level is unknown or above the usable one.
const Kernels& kernels_for(std::string_view name);

}  // namespace hal_cpu
