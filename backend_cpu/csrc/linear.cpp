// y = x w^T + bias, exact: activations enter as they are, products and sums are fp32.
#include <algorithm>

#include "args.h"
#include "block_linear.h"
#include "checks.h"
#include "isa.h"
#include "linear.h"
#include "ops.h"
#include "parallel.h"

namespace hal_cpu {
namespace {

// Converted activations kept at once; more rows than fit are processed in turns.
constexpr int64_t kRowBytes = int64_t{16} << 20;

struct LinearArgs {
  Tensor x;
  PackedTensors w;
  int64_t n, k, group, bits;
  std::string isa;
};

LinearArgs read(Args& args) {
  Tensor x = args.tensor();
  PackedTensors w = read_packed(args, true);
  const int64_t n = args.integer(), k = args.integer();
  const int64_t group = args.integer(), bits = args.integer();
  return {std::move(x), std::move(w), n, k, group, bits, args.text()};
}

struct Call {
  const Kernels& kernels;
  PackedMatrix w;
  const char* x;
  char* out;
  FloatKind kind, out_kind;
  int64_t size, out_size, rows;
};

bool run_rows(const Call& c, int64_t begin, int64_t count) {
  const Matrix& m = c.w.first;
  const int64_t padded = round_up(m.k, kTile);
  const int64_t sums = c.kernels.needs_sums(m) ? sums_per_row(m) : 0;
  const int planes = m.bits == 4 ? c.kernels.planes(c.kind) : 0;
  const int64_t stride = padded + padded * planes / 2;
  const auto bytes = [](int64_t n, size_t size) {
    return Scratch::bytes_for(static_cast<size_t>(n), size);
  };
  Scratch scratch(bytes(count * stride, 4) + bytes(count * sums, 4) + 3 * bytes(count, 8));
  auto* xf = scratch.take<float>(count * stride);
  auto* sf = scratch.take<float>(count * sums);
  auto** x = scratch.take<const float*>(count);
  auto** s = scratch.take<const float*>(count);
  auto** out = scratch.take<void*>(count);

  std::atomic<bool> inside{true};
  run_tasks(count, count * padded > kWorthThreads, [&](int64_t r) {
    float* row = xf + r * stride;
    if (!c.kernels.load_row(c.x + (begin + r) * m.k * c.size, c.kind, c.w.perm, 1.0f, row, m.k,
                            padded))
      inside = false;
    if (planes) c.kernels.split_row(row, m.k, planes);
    if (sums) c.kernels.block_sums(row, m.k, m.group, sf + r * sums);
    x[r] = row;
    s[r] = sf + r * sums;
    out[r] = c.out + (begin + r) * m.n * c.out_size;
  });
  if (!inside) return false;

  const int64_t tiles = div_up(m.n, kTile);
  const int64_t threads = torch::stable::get_num_threads();
  // Wide tasks reuse the activations; narrow problems are cut finer so that every thread works.
  int64_t step = kTilesPerCall;
  while (step > 1 && div_up(tiles, step) < 4 * threads) step /= 2;
  const int64_t run = run_length(div_up(tiles, step), threads) * step;
  const int64_t columns = div_up(tiles, run);
  int64_t rows = count;
  while (rows > 64 && columns * div_up(count, rows) < 4 * threads) rows = round_up(rows / 2, 8);
  const int64_t bands = div_up(count, rows);
  run_tasks(columns * bands, count * m.n * m.k > kWorthThreads, [&](int64_t task) {
    const int64_t first = task / bands * run, r0 = task % bands * rows;
    const int64_t last = std::min(first + run, tiles);
    const Rows part{x + r0, sums ? s + r0 : nullptr, std::min(rows, count - r0), planes};
    for (int64_t tile = first; tile < last; tile += step)
      c.kernels.linear(m, tile, std::min(step, last - tile), part, out + r0, c.out_kind);
  });
  return true;
}

bool run(const Call& c) {
  const Matrix& m = c.w.first;
  const int64_t turn =
      std::max<int64_t>(64, kRowBytes / 4 / round_up(m.k, kTile) / 64 * 64);
  for (int64_t begin = 0; begin < c.rows; begin += turn)
    if (!run_rows(c, begin, std::min(turn, c.rows - begin))) return false;
  return true;
}

}  // namespace

bool run_linear(const LinearCall& c) {
  const bool named = names_blocks(c.isa);
  const BlockLevel level = named ? block_level(c.isa) : BlockLevel{};
  const Kernels& kernels = kernels_for(named ? "auto" : c.isa);
  const int64_t size = c.kind == kFloat32 ? 4 : 2, out_size = c.out_kind == kFloat32 ? 4 : 2;
  // Few rows are exact at the pace of memory.
  if (named && (level.operand != kBf16 || c.rows >= kFewRows))
    return block_linear({level, c.w, c.x, c.out, c.kind, c.out_kind, size, out_size, c.rows});
  return run({kernels, c.w, c.x, c.out, c.kind, c.out_kind, size, out_size, c.rows});
}

namespace {

// `given` may be null: then the result is made, in the dtype of x.
Tensor linear(const LinearArgs& a, const Tensor* given) {
  const FloatKind kind = check_float(a.x, "x");
  check_plain(a.x, "x");
  const int64_t d = a.x.dim();
  if (d < 1 || d > 8) fail("x has shape ", shape_text(a.x), "; expected 1 to 8 dimensions");
  const PackedMatrix w = check_packed(a.w, {"", 0, a.n, a.k, a.group, a.bits});
  if (a.x.size(d - 1) != a.k)
    fail("x has shape ", shape_text(a.x), "; expected a last dimension of k=", a.k);
  int64_t shape[8], rows = 1;
  for (int64_t i = 0; i < d - 1; ++i) rows *= shape[i] = a.x.size(i);
  shape[d - 1] = a.n;
  if (given) {
    check_plain(*given, "out");
    bool same = given->dim() == d;
    for (int64_t i = 0; same && i < d; ++i) same = given->size(i) == shape[i];
    if (!same)
      fail("out has shape ", shape_text(*given), "; expected that of x, ", shape_text(a.x),
           ", with a last dimension of n=", a.n);
  }
  Tensor out = given ? *given : new_tensor(shape, d, a.x.scalar_type());
  const FloatKind out_kind = check_float(out, "out");
  const auto* from = static_cast<const char*>(a.x.data_ptr());
  auto* to = static_cast<char*>(out.data_ptr());
  if (!run_linear({a.isa, w, from, to, kind, out_kind, rows}))
    fail("perm has an index outside 0 to ", a.k - 1);
  return out;
}

}  // namespace

void linear_op(StableIValue* stack, uint64_t inputs, uint64_t) {
  Args args(stack, inputs);
  const LinearArgs a = read(args);
  put(stack, linear(a, nullptr));
}

void linear_out_op(StableIValue* stack, uint64_t inputs, uint64_t) {
  Args args(stack, inputs);
  const LinearArgs a = read(args);
  const Tensor out = args.tensor();
  linear(a, &out);
}

}  // namespace hal_cpu
