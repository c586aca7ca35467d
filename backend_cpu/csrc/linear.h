// y = x w^T + bias, exact or through records, whichever the level's name asks for.
#pragma once
#include <string_view>

#include "checks.h"

namespace hal_cpu {

struct LinearCall {
  std::string_view isa;
  PackedMatrix w;
  const char* x;
  char* out;
  FloatKind kind, out_kind;
  int64_t rows;
};

// False if the permutation has an index out of range.
bool run_linear(const LinearCall& c);

}  // namespace hal_cpu
