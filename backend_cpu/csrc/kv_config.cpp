#include "kv_config.h"

#include <cmath>
#include <cstring>

#include "error.h"
#include "isa.h"

namespace hal_cpu {
namespace {

struct Scheme {
  const char* name;
  KvKind kind;
  KvScales scales;
  bool correct;
};

constexpr Scheme kSchemes[] = {
    {"bf16", kKvBf16, kKvPlain, false},
    {"fp16", kKvFp16, kKvPlain, false},
    {"fp32", kKvFp32, kKvPlain, false},
    {"fp8", kKvFp8, kKvPlain, false},
    {"int8:channel", kKvInt8, kKvChannel, false},
    {"int8:token", kKvInt8, kKvToken, false},
    {"int4:channel", kKvInt4, kKvChannelMin, false},
    {"int4:token", kKvInt4, kKvTokenMin, false},
    {"turboquant:2", kKvTable2, kKvToken, true},
    {"turboquant:3", kKvTable3, kKvToken, true},
    {"turboquant:4", kKvTable4, kKvToken, true},
    {"turboquant:2:raw", kKvTable2, kKvToken, false},
    {"turboquant:3:raw", kKvTable3, kKvToken, false},
    {"turboquant:4:raw", kKvTable4, kKvToken, false},
};

// Entries of the codebook in 16 bits: the largest is this. More would leave fewer bits to what
// they are multiplied with, since sums of products stay inside 32.
constexpr float kTableMost = 8191.0f;

int64_t tile_bytes(KvKind kind, int64_t dim, bool key) {
  switch (kind) {
    case kKvInt4:
    case kKvTable4:
      return dim * 8;
    case kKvTable2:
      return dim * 4;
    case kKvTable3:
      return dim * 6;
    case kKvBf16:
    case kKvFp16:
    case kKvInt16:
      return dim * 32;
    case kKvFp32:
      return dim * 64;
    default:
      return dim * 16;
  }
}

int64_t scales_bytes(KvScales scales, int64_t dim) {
  switch (scales) {
    case kKvToken:
      return 2 * kKvTile;
    case kKvTokenMin:
      return 4 * kKvTile;
    case kKvChannel:
      return 2 * dim;
    case kKvChannelMin:
      return 4 * dim;
    default:
      return 0;
  }
}

const float* check_floats(const std::optional<Tensor>& t, const std::string& name,
                          std::initializer_list<int64_t> shape) {
  if (!t) fail(name, " is missing");
  check_plain(*t, name.c_str());
  check_type(*t, name.c_str(), ScalarType::Float);
  check_shape(*t, name.c_str(), shape);
  return static_cast<const float*>(t->data_ptr());
}

void fill_table(KvSideConfig& c, const KvSideArguments& a, const std::string& name) {
  const int64_t levels = c.side.kind == kKvTable2 ? 4 : c.side.kind == kKvTable3 ? 8 : 16;
  c.side.codebook = check_floats(a.codebook, name + "_codebook", {levels});
  const float* r = check_floats(a.rotation, name + "_rotation", {2, c.side.dim, c.side.dim});
  c.to_rotated = r;
  c.from_rotated = r + c.side.dim * c.side.dim;
  float most = 0.0f;
  for (int64_t i = 0; i < levels; ++i) {
    const float level = c.side.codebook[i];
    if (!std::isfinite(level)) fail(name, "_codebook[", i, "] is ", level);
    most = std::fmax(most, std::fabs(level));
  }
  if (most < 1e-20f) fail(name, "_codebook has no entry other than 0");
  c.side.step = most / kTableMost;
  for (size_t i = 0; i < c.table.size(); ++i)
    c.table[i] = static_cast<int16_t>(std::lrintf(c.side.codebook[i % static_cast<size_t>(levels)] / c.side.step));
  c.side.table = c.table.data();
}

void read_side(KvSideConfig& c, const KvSideArguments& a, const std::string& name, int64_t dim,
               int64_t heads, bool key, FloatKind dtype) {
  if (dim < 16 || dim > kKvMaxDim || dim % 16 != 0)
    fail(name, "_dim is ", dim, "; expected a multiple of 16 from 16 to ", kKvMaxDim);
  const Scheme* found = nullptr;
  for (const Scheme& s : kSchemes)
    if (a.scheme == s.name) found = &s;
  if (!found) fail(name, " scheme is '", a.scheme, "'; this backend has no such");
  c.side.kind = found->kind;
  c.side.scales = found->scales;
  c.correct = found->correct;
  c.side.dim = dim;
  c.side.exact = dtype == kFloat32 && found->kind < kKvFirstFloat;
  c.side.step = 1.0f;
  c.side.tile_bytes = tile_bytes(found->kind, dim, key);
  c.side.scales_bytes = scales_bytes(found->scales, dim);
  if (!key && c.grouped()) fail("value scheme is '", a.scheme, "'; values have scales per token");
  const bool rotated = found->kind == kKvTable2 || found->kind == kKvTable3 || found->kind == kKvTable4;
  if (rotated) fill_table(c, a, name);
  // Rounding may raise each of up to 256 terms by a half.
  const float code = rotated ? kTableMost : found->kind == kKvInt8 ? 128.0f : 15.0f;
  c.side.limit = 2147483520.0f / code - 256.0f;
  if (found->kind == kKvFp8) {
    c.static_scale = check_floats(a.scale, name + "_scale", {heads});
    for (int64_t h = 0; h < heads; ++h)
      if (!(c.static_scale[h] > 0.0f) || !std::isfinite(c.static_scale[h]))
        fail(name, "_scale[", h, "] is ", c.static_scale[h], "; expected a positive number");
  }
}

}  // namespace

KvConfig::KvConfig(const KvArguments& a, FloatKind dtype) : page_size(a.page_size), heads(a.heads) {
  check_range(page_size, "page_size", kKvTile, int64_t{1} << 20);
  if (page_size % kKvTile != 0) fail("page_size is ", page_size, "; expected a multiple of ", kKvTile);
  check_range(heads, "kv_heads", 1, int64_t{1} << 16);
  read_side(keys, a.keys, "key", a.key_dim, heads, true, dtype);
  read_side(values, a.values, "value", a.value_dim, heads, false, dtype);
  if (keys.grouped() && page_size % kKvGroup != 0)
    fail("page_size is ", page_size, "; keys with scales per channel need a multiple of ", kKvGroup);
  const int64_t tiles = page_size / kKvTile;
  KvSide &k = keys.side, &v = values.side;
  k.codes_at = 0;
  v.codes_at = tiles * k.tile_bytes;
  k.scales_at = v.codes_at + tiles * v.tile_bytes;
  v.scales_at = k.scales_at + (keys.grouped() ? tiles / 2 : tiles) * k.scales_bytes;
  k.head_bytes = v.head_bytes = v.scales_at + tiles * v.scales_bytes;
  page_bytes = heads * k.head_bytes;
  tail.kind = dtype == kFloat32 ? kKvFp32 : dtype == kFloat16 ? kKvFp16 : kKvBf16;
  tail.dim = a.key_dim;
  tail.step = 1.0f;
  tail.tile_bytes = tile_bytes(tail.kind, tail.dim, true);
  tail_bytes = keys.grouped() ? heads * 2 * tail.tile_bytes : 0;
}

KvArguments read_kv_arguments(Args& args) {
  KvArguments a;
  a.page_size = args.integer();
  a.heads = args.integer();
  a.key_dim = args.integer();
  a.value_dim = args.integer();
  for (KvSideArguments* side : {&a.keys, &a.values}) {
    side->scheme = args.text();
    side->codebook = args.maybe_tensor();
    side->rotation = args.maybe_tensor();
    side->scale = args.maybe_tensor();
  }
  return a;
}

const KvKernels& kv_kernels_for(std::string_view name) {
  struct Level {
    const char* name;
    Isa isa;
    const KvKernels& kernels;
  };
  static const Level kLevels[] = {{"avx2", Isa::kAvx2, kKvAvx2},
                                  {"avx512", Isa::kAvx512, kKvAvx512},
                                  {"avx512vnni", Isa::kAvx512Vnni, kKvAvx512Vnni}};
  for (const Level& level : kLevels) {
    if (name != level.name) continue;
    require_isa(level.isa);
    return level.kernels;
  }
  fail("isa is '", std::string(name), "'; it takes avx2, avx512 or avx512vnni");
}

// Words of 32 bits are read and written in place.
static void check_aligned(const Tensor& t, const char* name) {
  const auto address = reinterpret_cast<uintptr_t>(t.data_ptr());
  if (address % 4 != 0) fail(name, " begins at an address that is no multiple of 4");
}

void check_pages(const Tensor& pages, const KvConfig& c) {
  check_plain(pages, "pages");
  check_type(pages, "pages", ScalarType::Byte);
  if (pages.dim() != 2 || pages.size(1) != c.page_bytes)
    fail("pages has shape ", shape_text(pages), "; expected [pages, ", c.page_bytes, "]");
  check_aligned(pages, "pages");
}

void check_tails(const std::optional<Tensor>& tails, const std::optional<Tensor>& ids, int64_t count,
                 const char* per, const KvConfig& c) {
  if (c.tail_bytes == 0) {
    if (tails && tails->numel() > 0) fail("tails are given, and this cache has none");
    return;
  }
  if (!tails || !ids) fail("tails and tail_ids must be given: keys with scales per channel wait there");
  check_plain(*tails, "tails");
  check_type(*tails, "tails", ScalarType::Byte);
  if (tails->dim() != 2 || tails->size(1) != c.tail_bytes)
    fail("tails has shape ", shape_text(*tails), "; expected [sequences, ", c.tail_bytes, "]");
  check_aligned(*tails, "tails");
  check_plain(*ids, "tail_ids");
  check_type(*ids, "tail_ids", ScalarType::Int);
  if (ids->dim() != 1 || ids->size(0) != count)
    fail("tail_ids has shape ", shape_text(*ids), "; expected [", count, "], one a ", per);
  const auto* id = static_cast<const int32_t*>(ids->data_ptr());
  for (int64_t i = 0; i < count; ++i)
    if (id[i] < 0 || id[i] >= tails->size(0))
      fail("tail_ids[", i, "] is ", id[i], "; expected 0 to ", tails->size(0) - 1);
}

KvPlace kv_place(const KvSide& side, int64_t head, int64_t offset) {
  const int64_t tile = offset / kKvTile;
  const bool grouped = side.scales == kKvChannel || side.scales == kKvChannelMin;
  return {side.codes_at + head * side.head_bytes + tile * side.tile_bytes,
          side.scales_at + head * side.head_bytes + (grouped ? tile / 2 : tile) * side.scales_bytes,
          offset % kKvTile};
}

}  // namespace hal_cpu
