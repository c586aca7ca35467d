// The form of a record, and which kernels take it.
#pragma once
#include <string_view>

#include "blocks.h"
#include "checks.h"

namespace hal_cpu {

// What a word such as "avx512vnni:group" names: a level, and what becomes of activations there.
struct BlockLevel {
  const BlockKernels* kernels;
  Operand operand;
};

// Whether `name` names a level with a way of treating activations. Without one they stay exact.
bool names_blocks(std::string_view name);

// Throws if the level or the way is unknown, or above the usable level.
BlockLevel block_level(std::string_view name);

Records records_for(const Matrix& w, Operand operand);

// Whether a row has the same record for both.
bool same_records(const Records& a, const Records& b);

}  // namespace hal_cpu
