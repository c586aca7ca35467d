// What a decoder layer does between its matrices. Like kernels.h this crosses into units built for
// one instruction set, so nothing here may define an inline function or a template.
#pragma once
#include "kernels.h"

namespace hal_cpu {

// Keys that a task takes between two looks at the running maximum.
constexpr int64_t kAttendKeys = 64;

// Query rows of one kv head, `per_kv` for each position. Row i is element
// (i / per_kv) * step + (i % per_kv) * dim of q, and of the result with its own step.
struct Attend {
  FloatKind kind;  // of q, keys, values and the result
  const void* q;
  void* out;
  int64_t q_step, out_step;
  const void* keys;    // [tokens][dim]
  const void* values;  // [tokens][dim]
  int64_t dim, per_kv, rows;
  int64_t seen;  // tokens that the first position sees; each next one sees one more
  float scale;
};

// Running sums of the rows: max[rows], sum[rows], acc[rows][dim].
struct AttendSums {
  float *max, *sum, *acc;
};

struct LayerKernels {
  // out = weight * x / rms(x) of n values, rounded where the model's own module rounds.
  void (*norm)(const void* x, const void* weight, float eps, void* out, FloatKind kind, int64_t n);
  void (*add)(const void* a, const void* b, void* out, FloatKind kind, int64_t n);
  // out = act(gate) * up
  void (*gate)(const void* gate, const void* up, const Activation& act, void* out, FloatKind kind,
               int64_t n);
  // out = x * cos + rotate_half(x) * sin of one head; x may be out.
  void (*rotate)(const void* x, const void* cos, const void* sin, void* out, FloatKind kind,
                 int64_t dim);
  // Folds tokens [begin, end) into fresh sums. `work` has attend_floats().
  void (*attend)(const Attend& a, int64_t begin, int64_t end, const AttendSums& to, float* work);
  int64_t (*attend_floats)(int64_t rows, int64_t dim);
  // Joins `count` stretches, `step` floats apart, and writes the result.
  void (*finish)(const Attend& a, const AttendSums& first, int64_t count, int64_t step);
};

extern const LayerKernels kLayerAvx2;
extern const LayerKernels kLayerAvx512;

}  // namespace hal_cpu
