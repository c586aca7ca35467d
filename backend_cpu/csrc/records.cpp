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
} kWays[] = {{"token", kInt8Token}, {"group", kInt8Group}};

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

int64_t count_blocks(const Matrix& w, const Records& r) {
  const auto in_group = [&](int64_t size) {
    const int64_t span = r.span && r.span < size ? r.span : size;
    const int64_t rest = size % span;
    return size / span * div_up(span, r.block) + (rest ? div_up(rest, r.block) : 0);
  };
  const int64_t last = w.k - (w.groups - 1) * w.group;
  return (w.groups - 1) * in_group(w.group) + in_group(last);
}

}  // namespace

bool names_blocks(std::string_view name) { return name.find(':') != std::string_view::npos; }

BlockLevel block_level(std::string_view name) {
  const size_t colon = name.find(':');
  const std::string_view level = name.substr(0, colon), way = name.substr(colon + 1);
  for (const auto& known : kWays) {
    if (way != known.name) continue;
    if (level == "avx512vnni") {
      require_isa(Isa::kAvx512Vnni);
      return {&kBlocksAvx512Vnni, known.operand};
    }
  }
  fail("isa is '", std::string(name), "'; beside the exact levels it takes avx512vnni:token and avx512vnni:group");
}

Records records_for(const Matrix& w, Operand operand) {
  Records r{};
  r.operand = operand;
  r.padded = round_up(w.k, kRecordStep);
  r.group = w.group;
  r.span = operand == kInt8Group ? span_of(w) : 0;
  const int64_t whole = r.span ? std::min(r.span, w.group) : w.group;
  r.block = std::min(whole, kIntegerRun);
  r.blocks = count_blocks(w, r);
  r.scales_at = r.padded;
  r.sums_at = r.scales_at + r.blocks * 4;
  r.stride = round_up(r.sums_at + r.blocks * 4, kRecordStep);
  // Rows a multiple of 4 KiB apart would share the same few lines of the first cache.
  if (r.stride % 4096 == 0) r.stride += kRecordStep;
  r.factor = factor_of(w);
  return r;
}

bool same_records(const Records& a, const Records& b) {
  return a.operand == b.operand && a.padded == b.padded && a.group == b.group && a.span == b.span &&
         a.block == b.block && a.factor == b.factor;
}

}  // namespace hal_cpu
