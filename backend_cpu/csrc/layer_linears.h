// The matrices of a decoder layer, as its ops receive them.
#pragma once
#include "args.h"
#include "checks.h"

namespace hal_cpu {

// prefix_packed to prefix_bias, group, bits and isa. One that is not given stands behind the rows of
// the matrix before it.
struct LayerMatrix {
  PackedTensors tensors;
  int64_t group, bits;
  std::string isa;
  PackedMatrix w;

  explicit LayerMatrix(Args& args);
  bool given() const { return tensors.codes.has_value(); }
  void check(const char* name, int64_t n, int64_t k);
  // out = x w^T + bias, [rows, n] in the kind of x.
  void run(const char* x, FloatKind kind, int64_t rows, char* out) const;
};

// Where one matrix's results are: rows `step` bytes apart.
struct Columns {
  char* data;
  int64_t step;
};

// Matrices over one input, some of them behind the rows of the one before. Their widths in `widths`,
// their results in memory of as many values a row as the widths' sum; `to` receives the places.
void check_matrices(LayerMatrix* const* matrices, const char* const* names, const int64_t* widths,
                    int64_t count, int64_t k);
void run_matrices(const LayerMatrix* const* matrices, const int64_t* widths, int64_t count, const char* x,
                  FloatKind kind, int64_t rows, char* memory, Columns* to);

}  // namespace hal_cpu
