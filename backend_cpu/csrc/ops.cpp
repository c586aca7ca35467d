// Schemas and registration.
#include "ops.h"

#include <torch/csrc/stable/library.h>

#include "args.h"
#include "isa.h"

namespace hal_cpu {

void usable_isa_op(StableIValue* stack, uint64_t, uint64_t) {
  stack[0] = torch::stable::detail::from(std::string(isa_name(usable_isa())));
}

void preferred_isa_op(StableIValue* stack, uint64_t, uint64_t) {
  stack[0] = torch::stable::detail::from(std::string(isa_name(preferred_isa())));
}

}  // namespace hal_cpu

// clang-format off
#define HAL_CPU_LINEAR_ARGUMENTS \
  "Tensor x, Tensor packed, Tensor scales, Tensor? zeros, Tensor? mins, Tensor? perm, " \
  "Tensor? bias, int n, int k, int group, int bits, str isa"

#define HAL_CPU_MOE_ARGUMENTS \
  "Tensor x, Tensor topk_ids, Tensor topk_weights, " \
  "Tensor? gate_packed, Tensor? gate_scales, Tensor? gate_zeros, Tensor? gate_mins, " \
  "Tensor? gate_perm, Tensor? gate_bias, " \
  "Tensor up_packed, Tensor up_scales, Tensor? up_zeros, Tensor? up_mins, " \
  "Tensor? up_perm, Tensor? up_bias, " \
  "Tensor down_packed, Tensor down_scales, Tensor? down_zeros, Tensor? down_mins, " \
  "Tensor? down_perm, Tensor? down_bias, " \
  "Tensor? expert_map, int num_experts, int intermediate, " \
  "int gate_group, int up_group, int down_group, " \
  "int gate_bits, int up_bits, int down_bits, " \
  "str activation, float? alpha, float? limit, float routed_scaling, " \
  "bool router_weight_on_input, bool reduce, str isa"

#define HAL_CPU_MATRIX(name) \
  "Tensor? " name "_packed, Tensor? " name "_scales, Tensor? " name "_zeros, Tensor? " name "_mins, " \
  "Tensor? " name "_perm, Tensor? " name "_bias, int " name "_group, int " name "_bits, str " name "_isa, "
// clang-format on

STABLE_TORCH_LIBRARY(hal_cpu, m) {
  m.def("usable_isa() -> str");
  m.def("preferred_isa() -> str");
  m.def("pack(Tensor values, int k, int bits) -> Tensor");
  m.def("unpack(Tensor packed, int n, int k, int bits, bool signed) -> Tensor");
  m.def("pack_groups(Tensor groups) -> Tensor");
  m.def("unpack_groups(Tensor groups, int n) -> Tensor");
  m.def("join(Tensor[] parts) -> Tensor");
  m.def("unpack_words(Tensor words, str order, int bits, int count, bool signed, str isa) -> Tensor");
  m.def("turn(Tensor matrix, str isa) -> Tensor");
  m.def("linear(" HAL_CPU_LINEAR_ARGUMENTS ") -> Tensor");
  m.def("linear_out(" HAL_CPU_LINEAR_ARGUMENTS ", Tensor(a!) out) -> ()");
  m.def(
      "lookup(Tensor ids, Tensor packed, Tensor scales, Tensor? zeros, Tensor? mins, "
      "Tensor? perm, int n, int k, int group, int bits, ScalarType dtype) -> Tensor");
  m.def(
      "attention(Tensor x, Tensor cos, Tensor sin, Tensor(a!) keys, Tensor(b!) values, int held, Tensor norm, "
      "Tensor? q_norm, Tensor? k_norm, " HAL_CPU_MATRIX("q") HAL_CPU_MATRIX("k") HAL_CPU_MATRIX("v")
      HAL_CPU_MATRIX("o") "int heads, float eps, float scale) -> Tensor");
  m.def(
      "mlp(Tensor x, Tensor norm, " HAL_CPU_MATRIX("gate") HAL_CPU_MATRIX("up") HAL_CPU_MATRIX("down")
      "int intermediate, float eps, str activation) -> Tensor");
  m.def("moe(" HAL_CPU_MOE_ARGUMENTS ") -> Tensor");
  m.def("moe_out(" HAL_CPU_MOE_ARGUMENTS ", Tensor(a!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(hal_cpu, CompositeExplicitAutograd, m) {
  m.impl("usable_isa", &hal_cpu::usable_isa_op);
  m.impl("preferred_isa", &hal_cpu::preferred_isa_op);
}

STABLE_TORCH_LIBRARY_IMPL(hal_cpu, CPU, m) {
  m.impl("pack", &hal_cpu::pack_op);
  m.impl("unpack", &hal_cpu::unpack_op);
  m.impl("pack_groups", &hal_cpu::pack_groups_op);
  m.impl("unpack_groups", &hal_cpu::unpack_groups_op);
  m.impl("join", &hal_cpu::join_op);
  m.impl("unpack_words", &hal_cpu::unpack_words_op);
  m.impl("turn", &hal_cpu::turn_op);
  m.impl("linear", &hal_cpu::linear_op);
  m.impl("linear_out", &hal_cpu::linear_out_op);
  m.impl("lookup", &hal_cpu::lookup_op);
  m.impl("attention", &hal_cpu::attention_op);
  m.impl("mlp", &hal_cpu::mlp_op);
  m.impl("moe", &hal_cpu::moe_op);
  m.impl("moe_out", &hal_cpu::moe_out_op);
}
