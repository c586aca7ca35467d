// y = x w^T + bias through records of activations.
#pragma once
#include "records.h"

namespace hal_cpu {

struct BlockLinearCall {
  BlockLevel level;
  PackedMatrix w;
  const char* x;
  char* out;
  FloatKind kind, out_kind;
  int64_t size, out_size, rows;
};

// False if the permutation has an index out of range.
bool block_linear(const BlockLinearCall& c);

}  // namespace hal_cpu
