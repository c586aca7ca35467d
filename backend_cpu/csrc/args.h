// Reading an op's arguments off torch's stable stack.
//
// TORCH_BOX is not used: its conversion of `str` arguments leaks the copied string on every call,
// and each op here takes one.
#pragma once
#include <torch/csrc/stable/tensor.h>
#include <torch/csrc/stable/stableivalue_conversions.h>

#include <optional>
#include <string>
#include <vector>

#include "error.h"

namespace hal_cpu {

using torch::stable::Tensor;

// Takes ownership of each argument in turn. Everything must be read before anything may throw.
class Args {
 public:
  Args(StableIValue* stack, uint64_t count) : stack_(stack), left_(count) {}

  Tensor tensor() { return torch::stable::detail::to<Tensor>(next()); }
  std::optional<Tensor> maybe_tensor() {
    return torch::stable::detail::to<std::optional<Tensor>>(next());
  }
  std::vector<Tensor> tensors() { return torch::stable::detail::to<std::vector<Tensor>>(next()); }
  int64_t integer() { return torch::stable::detail::to<int64_t>(next()); }
  torch::headeronly::ScalarType scalar_type() {
    return torch::stable::detail::to<torch::headeronly::ScalarType>(next());
  }
  bool boolean() { return torch::stable::detail::to<bool>(next()); }
  double real() { return torch::stable::detail::to<double>(next()); }
  std::optional<double> maybe_real() {
    return torch::stable::detail::to<std::optional<double>>(next());
  }
  std::string text() {
    auto handle = torch::stable::detail::to<StringHandle>(next());
    const char* data = nullptr;
    size_t size = 0;
    STABLE_TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &size));
    STABLE_TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &data));
    std::string value(data, size);
    STABLE_TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
    return value;
  }

 private:
  StableIValue next() {
    if (left_ == 0) fail("an op read more arguments than its schema has");
    --left_;
    return *stack_++;
  }

  StableIValue* stack_;
  uint64_t left_;
};

inline void put(StableIValue* stack, const Tensor& value) {
  stack[0] = torch::stable::detail::from(value);
}

}  // namespace hal_cpu
