// What both halves of a decoder layer share: the rows that enter and their dtype.
#pragma once
#include "layer_kernels.h"
#include "layer_linears.h"
#include "parallel.h"

namespace hal_cpu {

// Rows [count, width] of one dtype.
struct LayerRows {
  const char* data;
  int64_t count, width;
  FloatKind kind;

  int64_t size() const { return kind == kFloat32 ? 4 : 2; }
  int64_t bytes(int64_t columns) const { return count * columns * size(); }
};

// x [batch, tokens, width], plain.
LayerRows check_rows(const Tensor& x);

// A vector of the same dtype.
void check_vector(const Tensor& t, const char* name, int64_t size, ScalarType type);

// The level that the common kernels run at: the preferred one of this process.
const LayerKernels& layer_kernels();

// Row tasks in bands, on several threads where there is enough to do.
template <class F>
void run_rows(int64_t rows, int64_t width, const F& row) {
  constexpr int64_t kBandRows = 8;
  run_tasks(div_up(rows, kBandRows), rows * width > kWorthEncoding, [&](int64_t band) {
    for (int64_t r = band * kBandRows; r < rows && r < (band + 1) * kBandRows; ++r) row(r);
  });
}

void norm_rows(const LayerRows& x, const Tensor& weight, double eps, char* out);
void add_rows(const LayerRows& x, const char* other, char* out);

}  // namespace hal_cpu
