// A checkpoint's packed words to canonical values in one pass, and matrices turned.
#include "unpack.h"

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <string>

#include "args.h"
#include "checks.h"
#include "isa.h"
#include "ops.h"
#include "parallel.h"

namespace hal_cpu {
namespace {

// Rows of the result that a task makes: their words fill some cache lines of each row of the input.
constexpr int64_t kStrip = 256;
// Below this many bytes another thread costs more than it saves.
constexpr int64_t kWorthBytes = int64_t{1} << 18;

const UnpackKernels& kernels(const std::string& isa) {
  if (isa == "plain") return kUnpackPlain;
  const bool wide = usable_isa() >= Isa::kAvx2;
  if (isa == "auto") return wide ? kUnpackAvx2 : kUnpackPlain;
  if (isa != "avx2") fail("isa is '", isa, "'; it takes plain, avx2 or auto");
  if (!wide) fail("isa is 'avx2', which this process may not use");
  return kUnpackAvx2;
}

void check_matrix(const Tensor& t, const char* name) {
  check_plain(t, name);
  if (t.dim() != 2) fail(name, " has shape ", shape_text(t), "; expected two dimensions");
  check_range(t.size(0), "the number of rows", 1, kMaxDim);
  check_range(t.size(1), "the number of columns", 1, kMaxDim);
}

// One task for each strip of `step` of `count`.
template <class F>
void run_strips(int64_t count, int64_t step, int64_t bytes, const F& strip) {
  run_tasks(div_up(count, step), bytes > kWorthBytes,
            [&](int64_t task) { strip(task * step, std::min((task + 1) * step, count)); });
}

Tensor unpack_words(const Tensor& words, const std::string& order, int64_t bits, int64_t count, bool as_signed,
                    const std::string& isa) {
  check_matrix(words, "words");
  check_type(words, "words", ScalarType::Int);
  check_range(count, "count", 1, kMaxDim);
  const bool by_rows = order == "rows", by_columns = order == "columns";
  if (!by_rows && !by_columns && order != "awq") fail("order is '", order, "'; it takes rows, columns or awq");
  if (bits != 4 && (bits < 2 || (bits != 8 && bits > 3) || order == "awq"))
    fail("bits is ", bits, "; expected ", order == "awq" ? "4" : "2, 3, 4 or 8");
  const PackedWords in{static_cast<const uint8_t*>(words.data_ptr()), words.size(0), words.size(1), count,
                       static_cast<int>(bits), as_signed};
  // the one packing by columns has no partly filled word
  if (by_columns && count * bits % 32) fail("count is ", count, "; codes of ", bits, " bits that fill whole words are expected");
  const int64_t along = by_rows ? in.columns : in.rows;
  const int64_t least = order == "awq" ? count : div_up(count * bits, 32);
  if (along != least)
    fail("words has shape ", shape_text(words), "; expected ", least, by_rows ? " columns" : " rows", " for ", count,
         " codes of ", bits, " bits");
  const int64_t n = by_rows ? in.rows : in.columns * (order == "awq" ? 8 : 1);
  const int64_t shape[2] = {n, in.row_bytes()};
  Tensor values = new_weights(shape, 2, as_signed && bits != 4 ? ScalarType::Char : ScalarType::Byte);
  auto* out = static_cast<uint8_t*>(values.data_ptr());
  const UnpackKernels& use = kernels(isa);
  const auto kernel = by_rows ? use.rows : by_columns ? use.columns : use.awq;
  const int64_t step = by_rows ? std::max<int64_t>(1, (int64_t{1} << 16) / in.row_bytes()) : by_columns ? kStrip : kStrip / 2;
  run_strips(by_rows ? in.rows : in.columns, step, n * in.row_bytes(),
             [&](int64_t first, int64_t last) { kernel(in, first, last, out); });
  return values;
}

Tensor turn_matrix(const Tensor& matrix, const std::string& isa) {
  check_matrix(matrix, "matrix");
  int64_t size = 0;
  switch (matrix.scalar_type()) {
    case ScalarType::Byte:
    case ScalarType::Char:
      size = 1;
      break;
    case ScalarType::Half:
    case ScalarType::BFloat16:
      size = 2;
      break;
    case ScalarType::Float:
    case ScalarType::Int:
      size = 4;
      break;
    default:
      fail("matrix is ", type_text(matrix.scalar_type()), "; expected elements of 1, 2 or 4 bytes");
  }
  const PlainMatrix in{static_cast<const uint8_t*>(matrix.data_ptr()), matrix.size(0), matrix.size(1), size};
  Tensor turned = new_tensor({in.columns, in.rows}, matrix.scalar_type());
  auto* out = static_cast<uint8_t*>(turned.data_ptr());
  const auto kernel = kernels(isa).turn;
  run_strips(in.columns, kStrip, in.rows * in.columns * size,
             [&](int64_t first, int64_t last) { kernel(in, first, last, out); });
  return turned;
}

}  // namespace

void unpack_words_op(StableIValue* stack, uint64_t inputs, uint64_t) {
  Args args(stack, inputs);
  const Tensor words = args.tensor();
  const std::string order = args.text();
  const int64_t bits = args.integer(), count = args.integer();
  const bool as_signed = args.boolean();
  const std::string isa = args.text();
  put(stack, unpack_words(words, order, bits, count, as_signed, isa));
}

void turn_op(StableIValue* stack, uint64_t inputs, uint64_t) {
  Args args(stack, inputs);
  const Tensor matrix = args.tensor();
  const std::string isa = args.text();
  put(stack, turn_matrix(matrix, isa));
}

}  // namespace hal_cpu
