// Which instruction set this process may use, decided once.
#pragma once
#include <string_view>

#include "kernels.h"

namespace hal_cpu {

// In rising order; a level needs all below it. kAvx512Vnni and kAmx add
// nothing to the exact kernels.
enum class Isa : int { kNone = 0, kAvx2 = 1, kAvx512 = 2, kAvx512Vnni = 3, kAvx512Bf16 = 4,
                       kAmx = 5 };

const char* isa_name(Isa isa);

// What CPUID offers and the operating system has enabled, lowered by HAL_CPU_ISA. Throws if that
// variable names no level.
Isa usable_isa();

// Throws unless `isa` is usable.
void require_isa(Isa isa);

// What "auto" means: the usable level whose exact kernels are fastest on this vendor's cores.
Isa preferred_isa();

// The exact kernels of level `name`. Throws if the level is unknown or above the usable one.
const Kernels& kernels_for(std::string_view name);

}  // namespace hal_cpu
