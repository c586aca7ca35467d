#include "layer_linears.h"

#include "linear.h"

namespace hal_cpu {

LayerMatrix::LayerMatrix(Args& args)
    : tensors(read_packed(args, false)), group(args.integer()), bits(args.integer()), isa(args.text()) {}

void LayerMatrix::check(const char* name, int64_t n, int64_t k) {
  w = check_packed(tensors, {name, 0, n, k, group, bits});
}

void LayerMatrix::run(const char* x, FloatKind kind, int64_t rows, char* out) const {
  if (!run_linear({isa, w, x, out, kind, kind, rows})) fail("perm has an index outside 0 to ", w.first.k - 1);
}

void check_matrices(LayerMatrix* const* matrices, const char* const* names, const int64_t* widths,
                    int64_t count, int64_t k) {
  if (!matrices[0]->given()) fail(names[0], "packed is None; only what follows it may be");
  for (int64_t i = 0; i < count;) {
    const int64_t first = i;
    int64_t n = widths[i];
    while (++i < count && !matrices[i]->given()) n += widths[i];
    matrices[first]->check(names[first], n, k);
  }
}

void run_matrices(const LayerMatrix* const* matrices, const int64_t* widths, int64_t count, const char* x,
                  FloatKind kind, int64_t rows, char* memory, Columns* to) {
  const int64_t size = kind == kFloat32 ? 4 : 2;
  int64_t step = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (!matrices[i]->given()) {
      to[i] = {to[i - 1].data + widths[i - 1] * size, step};
      continue;
    }
    step = matrices[i]->w.first.n * size;
    to[i] = {memory, step};
    matrices[i]->run(x, kind, rows, memory);
    memory += rows * step;
  }
}

}  // namespace hal_cpu
