// The second half of a decoder layer: x + down(act(gate(norm(x))) * up(norm(x))).
#include "layer_steps.h"
#include "moe_args.h"
#include "ops.h"

namespace hal_cpu {
namespace {

struct MlpArgs {
  Tensor x, norm;
  LayerMatrix gate, up, down;
  int64_t intermediate;
  double eps;
  std::string activation;

  explicit MlpArgs(Args& args)
      : x(args.tensor()), norm(args.tensor()), gate(args), up(args), down(args),
        intermediate(args.integer()), eps(args.real()), activation(args.text()) {}
};

Tensor mlp(MlpArgs& a) {
  const LayerRows x = check_rows(a.x);
  check_vector(a.norm, "norm", x.width, a.x.scalar_type());
  const Activation act = activation_of(a.activation);
  LayerMatrix* const both[] = {&a.gate, &a.up};
  const char* const names[] = {"gate_", "up_"};
  const int64_t widths[] = {a.intermediate, a.intermediate};
  check_range(a.intermediate, "intermediate", 1, kMaxDim);
  check_matrices(both, names, widths, 2, x.width);
  a.down.check("down_", x.width, a.intermediate);
  Tensor out = new_tensor({a.x.size(0), a.x.size(1), a.x.size(2)}, a.x.scalar_type());

  const int64_t wide = x.bytes(a.intermediate), step = a.intermediate * x.size();
  const auto bytes = [](int64_t n) { return LayerScratch::bytes_for(static_cast<size_t>(n), 1); };
  LayerScratch scratch(bytes(x.bytes(x.width)) + bytes(2 * wide) + bytes(wide));
  auto* narrow = scratch.take<char>(x.bytes(x.width));
  auto* memory = scratch.take<char>(2 * wide);
  auto* gated = scratch.take<char>(wide);

  norm_rows(x, a.norm, a.eps, narrow);
  Columns to[2];
  run_matrices(both, widths, 2, narrow, x.kind, x.count, memory, to);
  const LayerKernels& kernels = layer_kernels();
  run_rows(x.count, a.intermediate, [&](int64_t r) {
    kernels.gate(to[0].data + r * to[0].step, to[1].data + r * to[1].step, act, gated + r * step,
                 x.kind, a.intermediate);
  });
  a.down.run(gated, x.kind, x.count, narrow);
  add_rows(x, narrow, static_cast<char*>(out.data_ptr()));
  return out;
}

}  // namespace

void mlp_op(StableIValue* stack, uint64_t inputs, uint64_t) {
  Args args(stack, inputs);
  MlpArgs a(args);
  put(stack, mlp(a));
}

}  // namespace hal_cpu
