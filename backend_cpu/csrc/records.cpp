#include "records.h"

#include <algorithm>
#include <string>

#include "error.h"
#include "isa.h"

namespace hal_cpu {
namespace {

constexpr struct {
  const char* name;
  Operand operand;
} kWays[] = {{"token", kInt8Token},
             {"group", kInt8Group},
             {"rescaled", kInt8Rescaled},
             {"bf16", kBf16}};

constexpr struct {
  const char* name;
  Isa least;
  const BlockKernels* kernels;
  bool tiles;
} kLevels[] = {{"avx512vnni", Isa::kAvx512Vnni, &kBlocksAvx512Vnni, false},
               {"amx", Isa::kAmx, &kBlocksAmx, true},
               {"emulated", Isa::kAvx512Bf16, &kBlocksAmxEmulated, true}};

// Activation spans of the `group` way: those of the weights, but 128 where these are longer and
// hold whole ones. A row with one weight scale has spans of 128.
constexpr int64_t kSpan = 128;

int64_t span_of(const Matrix& w) {
  return w.groups == 1 ? kSpan : w.group > kSpan && w.group % kSpan == 0 ? kSpan : w.group;
}

int32_t factor_of(const Matrix& w) {
  if (w.zero == kZeroInteger) return -1;
  return w.zero == kZeroMinimum ? 1 : -(1 << (w.bits - 1));
}

int64_t count_blocks(int64_t k, const Records& r) {
  const auto in_group = [&](int64_t size) {
    const int64_t span = r.span && r.span < size ? r.span : size;
    const int64_t rest = size % span;
    return size / span * div_up(span, r.block) + (rest ? div_up(rest, r.block) : 0);
  };
  const int64_t groups = div_up(k, r.group);
  return (groups - 1) * in_group(r.group) + in_group(k - (groups - 1) * r.group);
}

}  // namespace

bool names_blocks(std::string_view name) { return name.find(':') != std::string_view::npos; }

BlockLevel block_level(std::string_view name) {
  const size_t colon = name.find(':');
  const std::string_view level = name.substr(0, colon), way = name.substr(colon + 1);
  for (const auto& known : kWays) {
    for (const auto& row : kLevels) {
      const bool needs_tiles = known.operand == kInt8Rescaled || known.operand == kBf16;
      if (way != known.name || level != row.name || (needs_tiles && !row.tiles)) continue;
      require_isa(row.least);
      return {row.kernels, known.operand};
    }
  }
  fail("isa is '", std::string(name), "'; beside the exact levels it takes avx512vnni:token, ",
       "avx512vnni:group and amx: with token, group, rescaled or bf16");
}

int64_t few_rescaled(const Matrix& w) { return std::clamp<int64_t>(w.group / 2, 8, 64); }

Records records_for(const Matrix& w, Operand operand) {
  const bool half = operand == kBf16;
  Records r{};
  r.operand = operand;
  // A tile of bf16 may begin anywhere, and beyond the last k meets weights of zero: what is there
  // must not be NaN.
  r.padded = half ? round_up(w.k, kRecordStep / 2) + kRecordStep / 2 : round_up(w.k, kRecordStep);
  r.group = operand == kInt8Rescaled ? w.k : w.group;
  r.span = operand == kInt8Group ? span_of(w) : 0;
  const int64_t whole = r.span ? std::min(r.span, r.group) : r.group;
  r.block = std::min(whole, half ? kIntegerRun / 2 : kIntegerRun);
  r.blocks = count_blocks(w.k, r);
  r.scales_at = half ? 2 * r.padded : r.padded;
  r.sums_at = r.scales_at + r.blocks * 4;
  r.stride = round_up(r.sums_at + r.blocks * 4, kRecordStep);
  // Rows a multiple of 4 KiB apart would share the same few lines of the first cache.
  if (r.stride % 4096 == 0) r.stride += kRecordStep;
  r.factor = half ? w.bits == 4 : factor_of(w);
  return r;
}

void check_operand(const Matrix& w, Operand operand, const char* name) {
  if (operand == kInt8Rescaled && (w.bits != 4 || w.zero != kZeroNone))
    fail(name, "weights of ", w.bits, " bits", w.zero == kZeroNone ? "" : " with zero points or minima",
         " cannot be rescaled; expected 4 bits without");
}

bool same_records(const Records& a, const Records& b) {
  return a.operand == b.operand && a.padded == b.padded && a.group == b.group && a.span == b.span &&
         a.block == b.block && a.factor == b.factor;
}

}  // namespace hal_cpu
