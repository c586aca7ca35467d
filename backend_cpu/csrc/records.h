// The form of a record, and which kernels take it.
#pragma once
#include <string_view>

#include "blocks.h"
#include "checks.h"

namespace hal_cpu {

// Fewer rows a matrix than this are not worth bf16 tiles.
constexpr int64_t kFewRows = 8;

// Fewer rows a matrix than this are not worth rescaling its weights, which takes longer than taking
// a group's sum by itself unless groups are short.
int64_t few_rescaled(const Matrix& w);

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

// Throws where the weights have no form for it.
void check_operand(const Matrix& w, Operand operand, const char* name);

// Whether a row has the same record for both.
bool same_records(const Records& a, const Records& b);

}  // namespace hal_cpu
