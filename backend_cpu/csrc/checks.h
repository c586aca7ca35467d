// What every op asks of its tensors. Each check raises with the numbers.
#pragma once
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <initializer_list>
#include <optional>
#include <string>

#include "kernels.h"

namespace hal_cpu {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Largest dimension and element count taken: products of them stay far inside int64.
constexpr int64_t kMaxDim = int64_t{1} << 31;

inline int64_t div_up(int64_t a, int64_t b) { return a / b + (a % b != 0); }
inline int64_t round_up(int64_t a, int64_t b) { return div_up(a, b) * b; }

// How many blocks of tiles a task takes in a row: neighbours in memory follow each other at the
// pace of the prefetcher, while enough tasks are left to even out the threads.
inline int64_t run_length(int64_t blocks, int64_t threads) {
  const int64_t run = blocks / (8 * threads);
  return run < 1 ? 1 : run > 8 ? 8 : run;
}

std::string shape_text(const Tensor& t);
const char* type_text(ScalarType type);

// On the CPU and contiguous.
void check_plain(const Tensor& t, const char* name);
void check_type(const Tensor& t, const char* name, ScalarType type);
void check_shape(const Tensor& t, const char* name, std::initializer_list<int64_t> shape);
// fp32, fp16 or bf16.
FloatKind check_float(const Tensor& t, const char* name);
void check_range(int64_t value, const char* name, int64_t low, int64_t high);

Tensor new_tensor(std::initializer_list<int64_t> shape, ScalarType type);
Tensor new_tensor(const int64_t* shape, int64_t dims, ScalarType type);

// As new_tensor, for weights: asks the operating system for huge pages before they are touched,
// since a walk through small ones costs a tenth of the memory's rate.
Tensor new_weights(const int64_t* shape, int64_t dims, ScalarType type);

// The packed tensors of one matrix, or of one per expert, as the ops receive them.
struct PackedTensors {
  std::optional<Tensor> codes, scales, zeros, mins, perm, bias;
};

// The next six arguments; codes and scales may be missing unless they are required.
class Args;
PackedTensors read_packed(Args& args, bool required);

struct PackedSpec {
  const char* name;  // prefix in messages: "" or "gate_" and so on
  int64_t experts;   // 0: no expert dimension
  int64_t n, k, group, bits;
};

// A checked matrix and the strides from one expert to the next.
struct PackedMatrix {
  Matrix first{};
  const int32_t* perm = nullptr;
  int64_t code_step = 0, group_step = 0;

  Matrix expert(int64_t e) const;
  const int32_t* expert_perm(int64_t e) const { return perm ? perm + e * first.k : nullptr; }
};

PackedMatrix check_packed(const PackedTensors& t, const PackedSpec& spec);

int64_t sums_per_row(const Matrix& m);

}  // namespace hal_cpu
