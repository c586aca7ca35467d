#include "block_linear.h"

#include <algorithm>

#include "parallel.h"

namespace hal_cpu {
namespace {

// Records kept at once; more rows than fit are processed in turns.
constexpr int64_t kRowBytes = int64_t{32} << 20;

bool encode_rows(const BlockLinearCall& c, const Records& form, int64_t begin, int64_t count,
                 char* records) {
  const BlockKernels& kernels = *c.level.kernels;
  const int64_t k = c.w.first.k, padded = round_up(k, kTile);
  std::atomic<bool> inside{true};
  run_tasks(count, count * padded > kWorthEncoding, [&](int64_t r) {
    TaskScratch scratch(TaskScratch::bytes_for(static_cast<size_t>(padded), 4));
    auto* row = scratch.take<float>(padded);
    if (!kernels.load_row(c.x + (begin + r) * k * c.size, c.kind, c.w.perm, 1.0f, row, k, padded))
      inside = false;
    kernels.encode(row, k, form, records + r * form.stride);
  });
  return inside;
}

bool run_turn(const BlockLinearCall& c, const Records& form, int64_t begin, int64_t count) {
  const Matrix& m = c.w.first;
  const BlockKernels& kernels = *c.level.kernels;
  const int64_t bytes = (count + kSlackRows) * form.stride;
  Scratch scratch(Scratch::bytes_for(static_cast<size_t>(bytes), 1));
  auto* records = scratch.take<char>(bytes);
  if (!encode_rows(c, form, begin, count, records)) return false;

  const int64_t tiles = div_up(m.n, kTile);
  const int64_t threads = torch::stable::get_num_threads();
  int64_t step = kTilesPerCall;
  while (step > 1 && div_up(tiles, step) < 4 * threads) step /= 2;
  const int64_t run = run_length(div_up(tiles, step), threads) * step;
  const int64_t columns = div_up(tiles, run), bands = div_up(count, kBand);
  const int64_t row_bytes = m.n * c.out_size;
  run_tasks(columns * bands, count * m.n * m.k > kWorthThreads, [&](int64_t task) {
    const int64_t first = task / bands * run, r0 = task % bands * kBand;
    const int64_t last = std::min(first + run, tiles);
    const BlockRows rows{records + r0 * form.stride, std::min(kBand, count - r0)};
    TaskScratch own(TaskScratch::bytes_for(kBandFloats, 4));
    auto* work = own.take<float>(kBandFloats);
    for (int64_t tile = first; tile < last; tile += step)
      kernels.linear(m, form, tile, std::min(step, last - tile), rows, work,
                     c.out + (begin + r0) * row_bytes, row_bytes, c.out_kind);
    kernels.leave();
  });
  return true;
}

}  // namespace

bool block_linear(const BlockLinearCall& c) {
  check_operand(c.w.first, c.level.operand, "");
  // For few rows the weights stay as they are.
  const bool few = c.level.operand == kInt8Rescaled && c.rows < few_rescaled(c.w.first);
  const Records form = records_for(c.w.first, few ? kInt8Token : c.level.operand);
  const int64_t turn = std::max(kBand, kRowBytes / form.stride / kBand * kBand);
  for (int64_t begin = 0; begin < c.rows; begin += turn)
    if (!run_turn(c, form, begin, std::min(turn, c.rows - begin))) return false;
  return true;
}

}  // namespace hal_cpu
