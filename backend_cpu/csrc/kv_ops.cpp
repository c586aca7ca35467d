// Schemas and registration of the KV ops.
#include "kv_ops.h"

#include <torch/csrc/stable/library.h>

// clang-format off
#define HAL_CPU_KV_ARGUMENTS \
  "int page_size, int kv_heads, int head_dim, int value_dim, " \
  "str keys, Tensor? key_codebook, Tensor? key_rotation, Tensor? key_scale, " \
  "str values, Tensor? value_codebook, Tensor? value_rotation, Tensor? value_scale"
// clang-format on

STABLE_TORCH_LIBRARY_FRAGMENT(hal_cpu, m) {
  m.def(
      "kv_append(Tensor(a!) pages, Tensor k, Tensor v, Tensor slots, Tensor(b!)? tails, "
      "Tensor? tail_ids, " HAL_CPU_KV_ARGUMENTS ", str isa) -> ()");
  m.def(
      "kv_attend(Tensor q, Tensor pages, Tensor block_table, Tensor lengths, Tensor query_starts, "
      "Tensor? tails, Tensor? tail_ids, Tensor? sinks, " HAL_CPU_KV_ARGUMENTS
      ", float scale, bool causal, int window, int sink_tokens, float soft_cap, str isa, "
      "Tensor(a!) out, Tensor(b!) lse) -> ()");
  m.def(
      "kv_read(Tensor pages, Tensor block_row, int start, int length, Tensor? tails, "
      "Tensor? tail_ids, " HAL_CPU_KV_ARGUMENTS
      ", ScalarType tail_dtype, str isa, Tensor(a!) k, Tensor(b!) v) -> ()");
  m.def(
      "kv_reopen(Tensor pages, Tensor block_row, int length, Tensor(a!) tails, Tensor tail_ids, "
      HAL_CPU_KV_ARGUMENTS ", ScalarType tail_dtype, str isa) -> ()");
  // [page_bytes, tail_bytes]
  m.def("kv_sizes(" HAL_CPU_KV_ARGUMENTS ", ScalarType tail_dtype) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(hal_cpu, CPU, m) {
  m.impl("kv_append", &hal_cpu::kv_append_op);
  m.impl("kv_attend", &hal_cpu::kv_attend_op);
  m.impl("kv_read", &hal_cpu::kv_read_op);
  m.impl("kv_reopen", &hal_cpu::kv_reopen_op);
}

STABLE_TORCH_LIBRARY_IMPL(hal_cpu, CompositeExplicitAutograd, m) {
  m.impl("kv_sizes", &hal_cpu::kv_sizes_op);
}
