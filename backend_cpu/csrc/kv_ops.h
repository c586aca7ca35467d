// The boxed entry points of the KV ops; schemas are in kv_ops.cpp.
#pragma once
#include <torch/csrc/stable/c/shim.h>

#include "kv.h"

namespace hal_cpu {

void kv_append_op(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void kv_attend_op(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void kv_read_op(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void kv_reopen_op(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void kv_sizes_op(StableIValue* stack, uint64_t inputs, uint64_t outputs);

// Codes of a vector of floats (not fp8) to fp32, and back.
void kv_widen(const KvKernels& kernels, const KvSide& side, const uint32_t* codes, float* x);
void kv_narrow(const KvKernels& kernels, const KvSide& side, const float* x, uint32_t* codes);

}  // namespace hal_cpu
