// The arguments of the mixture-of-experts op, checked.
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "args.h"
#include "checks.h"

namespace hal_cpu {

// As they come off the stack.
struct MoeArgs {
  Tensor x, ids, weights;
  PackedTensors gate, up, down;
  std::optional<Tensor> expert_map;
  int64_t experts, intermediate;
  int64_t gate_group, up_group, down_group, gate_bits, up_bits, down_bits;
  std::string activation;
  std::optional<double> alpha, limit;
  double routed_scaling;
  bool weight_on_input, reduce;
  std::string isa;

  explicit MoeArgs(Args& args);
};

// Without alpha or limit. Throws if the name is unknown.
Activation activation_of(std::string_view name);

struct MoeCall {
  const Kernels& kernels;  // the exact ones
  FloatKind kind, out_kind;
  int64_t size, out_size;  // bytes of one element of x and of the result
  int64_t tokens, slots, hidden, intermediate, experts;
  bool has_gate, weight_on_input, reduce;
  PackedMatrix gate, up, down;
  Activation act;
  float scaling;
  const char* x;
  const float* weights;         // [tokens, slots]
  std::vector<int32_t> local;   // [tokens, slots]
};

MoeCall check_moe(const MoeArgs& a);

}  // namespace hal_cpu
