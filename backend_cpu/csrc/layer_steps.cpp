#include "layer_steps.h"

#include "isa.h"

namespace hal_cpu {

LayerRows check_rows(const Tensor& x) {
  check_plain(x, "x");
  const FloatKind kind = check_float(x, "x");
  if (x.dim() != 3) fail("x has shape ", shape_text(x), "; expected [batch, tokens, hidden]");
  check_range(x.size(0) * x.size(1), "batch * tokens", 0, kMaxDim);
  return {static_cast<const char*>(x.data_ptr()), x.size(0) * x.size(1), x.size(2), kind};
}

void check_vector(const Tensor& t, const char* name, int64_t size, ScalarType type) {
  check_plain(t, name);
  check_type(t, name, type);
  check_shape(t, name, {size});
}

const LayerKernels& layer_kernels() {
  require_isa(Isa::kAvx2);
  return usable_isa() >= Isa::kAvx512 ? kLayerAvx512 : kLayerAvx2;
}

void norm_rows(const LayerRows& x, const Tensor& weight, double eps, char* out) {
  const int64_t step = x.width * x.size();
  const void* w = weight.data_ptr();
  const LayerKernels& kernels = layer_kernels();
  run_rows(x.count, x.width, [&](int64_t r) {
    kernels.norm(x.data + r * step, w, static_cast<float>(eps), out + r * step, x.kind, x.width);
  });
}

void add_rows(const LayerRows& x, const char* other, char* out) {
  const int64_t step = x.width * x.size();
  const LayerKernels& kernels = layer_kernels();
  run_rows(x.count, x.width, [&](int64_t r) {
    kernels.add(x.data + r * step, other + r * step, out + r * step, x.kind, x.width);
  });
}

}  // namespace hal_cpu
