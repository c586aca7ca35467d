// The boxed entry point of each op; schemas are in ops.cpp.
#pragma once
#include <torch/csrc/stable/c/shim.h>

namespace hal_cpu {

void usable_isa_op(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void preferred_isa_op(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void join_op(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void pack_op(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void unpack_op(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void pack_groups_op(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void unpack_groups_op(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void unpack_words_op(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void turn_op(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void linear_op(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void linear_out_op(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void attention_op(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void mlp_op(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void lookup_op(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void moe_op(StableIValue* stack, uint64_t inputs, uint64_t outputs);
void moe_out_op(StableIValue* stack, uint64_t inputs, uint64_t outputs);

}  // namespace hal_cpu
