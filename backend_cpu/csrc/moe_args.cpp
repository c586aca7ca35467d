#include "moe_args.h"

#include "isa.h"
#include "moe_routing.h"
#include "records.h"

namespace hal_cpu {

Activation activation_of(std::string_view name) {
  static constexpr struct {
    const char* name;
    ActivationKind kind;
  } kNames[] = {{"silu", kSilu},
                {"gelu", kGelu},
                {"gelu_tanh", kGeluTanh},
                {"swiglu_oai", kSwigluOai},
                {"relu2", kRelu2}};
  for (const auto& entry : kNames)
    if (name == entry.name) return {entry.kind, false, 1.0f, 0.0f};
  fail("activation is '", std::string(name), "'; it takes silu, gelu, gelu_tanh, swiglu_oai or relu2");
}

namespace {

Activation check_activation(const MoeArgs& a, bool has_gate) {
  // gpt-oss's slope, for checkpoints that do not state it.
  constexpr float kOaiAlpha = 1.702f;
  Activation act = activation_of(a.activation);
  const bool oai = act.kind == kSwigluOai;
  if (oai && !has_gate) fail("activation swiglu_oai needs a gate");
  if (oai) act.alpha = kOaiAlpha;
  if (a.alpha) {
    if (act.kind != kSilu && !oai)
      fail("alpha belongs to activations silu and swiglu_oai, not ", a.activation);
    act.alpha = static_cast<float>(*a.alpha);
  }
  if (a.limit) {
    if (!(*a.limit > 0)) fail("limit is ", *a.limit, "; expected a positive number");
    act.has_limit = true;
    act.limit = static_cast<float>(*a.limit);
  }
  return act;
}

}  // namespace

MoeArgs::MoeArgs(Args& args)
    : x(args.tensor()), ids(args.tensor()), weights(args.tensor()) {
  gate = read_packed(args, false);
  up = read_packed(args, true);
  down = read_packed(args, true);
  expert_map = args.maybe_tensor();
  experts = args.integer();
  intermediate = args.integer();
  gate_group = args.integer();
  up_group = args.integer();
  down_group = args.integer();
  gate_bits = args.integer();
  up_bits = args.integer();
  down_bits = args.integer();
  activation = args.text();
  alpha = args.maybe_real();
  limit = args.maybe_real();
  routed_scaling = args.real();
  weight_on_input = args.boolean();
  reduce = args.boolean();
  isa = args.text();
}

MoeCall check_moe(const MoeArgs& a) {
  const Kernels& kernels = kernels_for(names_blocks(a.isa) ? "auto" : a.isa);
  const FloatKind kind = check_float(a.x, "x");
  check_plain(a.x, "x");
  if (a.x.dim() != 2) fail("x has shape ", shape_text(a.x), "; expected [tokens, hidden]");
  const int64_t tokens = a.x.size(0), hidden = a.x.size(1);
  check_plain(a.ids, "topk_ids");
  check_type(a.ids, "topk_ids", ScalarType::Int);
  if (a.ids.dim() != 2 || a.ids.size(0) != tokens)
    fail("topk_ids has shape ", shape_text(a.ids), "; expected [", tokens, ", k]");
  const int64_t slots = a.ids.size(1);
  check_range(tokens * slots, "tokens * k", 0, kMaxDim - 1);
  check_plain(a.weights, "topk_weights");
  check_type(a.weights, "topk_weights", ScalarType::Float);
  check_shape(a.weights, "topk_weights", {tokens, slots});
  check_range(a.experts, "num_experts", 1, int64_t{1} << 24);

  const bool has_gate = a.gate.codes.has_value();
  if (!has_gate && (a.gate.scales || a.gate.zeros || a.gate.mins || a.gate.perm || a.gate.bias))
    fail("gate_packed is None but another gate tensor is given");
  const int64_t size = kind == kFloat32 ? 4 : 2;
  MoeCall c{kernels, kind,    kind, size, size,
            tokens,  slots,   hidden,
            a.intermediate,   a.experts,
            has_gate, a.weight_on_input, a.reduce,
            {},      {},      {},
            check_activation(a, has_gate),
            static_cast<float>(a.routed_scaling),
            static_cast<const char*>(a.x.data_ptr()),
            static_cast<const float*>(a.weights.data_ptr()),
            {}};
  const int64_t e = a.experts, i = a.intermediate;
  if (has_gate) c.gate = check_packed(a.gate, {"gate_", e, i, hidden, a.gate_group, a.gate_bits});
  c.up = check_packed(a.up, {"up_", e, i, hidden, a.up_group, a.up_bits});
  c.down = check_packed(a.down, {"down_", e, hidden, i, a.down_group, a.down_bits});

  IdCheck ids{static_cast<const int32_t*>(a.ids.data_ptr()), tokens, slots, nullptr, e, e};
  if (a.expert_map) {
    check_plain(*a.expert_map, "expert_map");
    check_type(*a.expert_map, "expert_map", ScalarType::Int);
    if (a.expert_map->dim() != 1)
      fail("expert_map has shape ", shape_text(*a.expert_map), "; expected [global experts]");
    ids.expert_map = static_cast<const int32_t*>(a.expert_map->data_ptr());
    ids.global_experts = a.expert_map->size(0);
  }
  c.local = local_experts(ids);
  return c;
}

}  // namespace hal_cpu
