// Pages back to floats, and a closed group of keys back to its sequence's tail.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "error.h"
#include "kv_config.h"
#include "kv_ops.h"
#include "parallel.h"

namespace hal_cpu {

void kv_widen(const KvKernels& kernels, const KvSide& side, const uint32_t* codes, float* x) {
  alignas(64) uint16_t half[kKvMaxDim];
  if (side.kind == kKvFp32) {
    std::memcpy(x, codes, static_cast<size_t>(side.dim) * 4);
    return;
  }
  for (int64_t i = 0; i < side.dim; ++i) half[i] = static_cast<uint16_t>(codes[i]);
  kernels.load(half, side.kind == kKvFp16 ? kFloat16 : kBFloat16, 1.0f, x, side.dim);
}

void kv_narrow(const KvKernels& kernels, const KvSide& side, const float* x, uint32_t* codes) {
  alignas(64) uint16_t half[kKvMaxDim];
  if (side.kind == kKvFp32) {
    std::memcpy(codes, x, static_cast<size_t>(side.dim) * 4);
    return;
  }
  kernels.store(x, 1.0f, half, side.kind == kKvFp16 ? kFloat16 : kBFloat16, side.dim);
  for (int64_t i = 0; i < side.dim; ++i) codes[i] = half[i];
}

namespace {

float fp8_value(uint32_t code) {
  const uint32_t most = code & 0x7f;
  float v = most == 0x7f                ? std::numeric_limits<float>::quiet_NaN()
            : most < 8                  ? std::ldexp(static_cast<float>(most), -9)
                                        : std::ldexp(static_cast<float>(8 + most % 8), static_cast<int>(most / 8) - 10);
  return code & 0x80 ? -v : v;
}

struct Reader {
  const KvConfig& c;
  const KvKernels& kernels;
  const uint8_t* pages;
  const int32_t* block_row;

  // What a token's codes in its page read back as.
  void stored(const KvSideConfig& s, bool key, int64_t head, int64_t position, float* x) const {
    const KvSide& side = s.side;
    const uint8_t* page = pages + block_row[position / c.page_size] * c.page_bytes;
    const KvPlace at = kv_place(side, head, position % c.page_size);
    alignas(64) uint32_t codes[kKvMaxDim];
    alignas(64) float scale[2 * kKvMaxDim], centroids[kKvMaxDim];
    get_codes(side, key, page + at.tile, at.token, codes);
    const auto* scales = reinterpret_cast<const uint16_t*>(page + at.scales);
    if (s.grouped()) kernels.halves(scales, scale, side.scales_bytes / 2);
    else if (side.scales != kKvPlain) kernels.halves(scales + at.token, scale, 1);
    if (side.scales == kKvTokenMin) kernels.halves(scales + kKvTile + at.token, scale + 1, 1);
    if (side.kind == kKvFp8) {
      const float factor = s.head_scale(head);
      for (int64_t i = 0; i < side.dim; ++i) x[i] = fp8_value(codes[i]) * factor;
    } else if (side.kind >= kKvFirstFloat) {
      kv_widen(kernels, side, codes, x);
    } else if (side.codebook) {
      for (int64_t i = 0; i < side.dim; ++i) centroids[i] = side.codebook[codes[i]];
      kernels.rotate(centroids, s.from_rotated, x, 1, side.dim);
      for (int64_t i = 0; i < side.dim; ++i) x[i] = scale[0] * x[i];
    } else {
      integers(s, codes, scale, x);
    }
  }

  static void integers(const KvSideConfig& s, const uint32_t* codes, const float* scale, float* x) {
    const KvSide& side = s.side;
    for (int64_t i = 0; i < side.dim; ++i) {
      const float code = side.kind == kKvInt8 ? static_cast<float>(static_cast<int8_t>(codes[i]))
                                              : static_cast<float>(codes[i]);
      x[i] = code * scale[s.grouped() ? i : 0];
      if (side.scales == kKvChannelMin) x[i] = x[i] + scale[side.dim + i];
      if (side.scales == kKvTokenMin) x[i] = x[i] + scale[1];
    }
  }

  void open(const uint8_t* tail, int64_t head, int64_t in_group, float* x) const {
    alignas(64) uint32_t codes[kKvMaxDim];
    const uint8_t* tile = tail + (head * 2 + in_group / kKvTile) * c.tail.tile_bytes;
    get_codes(c.tail, true, tile, in_group % kKvTile, codes);
    kv_widen(kernels, c.tail, codes, x);
  }
};

Reader check_row(const KvConfig& c, const KvKernels& kernels, const Tensor& pages,
                 const Tensor& block_row, int64_t length) {
  check_pages(pages, c);
  check_plain(block_row, "block_row");
  check_type(block_row, "block_row", ScalarType::Int);
  if (block_row.dim() != 1) fail("block_row has shape ", shape_text(block_row), "; expected [pages]");
  check_range(length, "length", 0, block_row.size(0) * c.page_size);
  const auto* row = static_cast<const int32_t*>(block_row.data_ptr());
  for (int64_t i = 0; i < div_up(length, c.page_size); ++i)
    if (row[i] < 0 || row[i] >= pages.size(0))
      fail("block_row[", i, "] is ", row[i], "; expected 0 to ", pages.size(0) - 1);
  return {c, kernels, static_cast<const uint8_t*>(pages.data_ptr()), row};
}

FloatKind tail_kind(ScalarType type) {
  if (type == ScalarType::Float) return kFloat32;
  if (type == ScalarType::Half) return kFloat16;
  if (type == ScalarType::BFloat16) return kBFloat16;
  fail("tail_dtype is ", type_text(type), "; expected float32, float16 or bfloat16");
}

struct ReadArguments {
  Tensor pages, block_row;
  int64_t start, length;
  std::optional<Tensor> tails, tail_ids;
  KvArguments cache;
  ScalarType tail_dtype;
  std::string isa;
};

void read(const ReadArguments& a, const Tensor& k, const Tensor& v) {
  const KvKernels& kernels = kv_kernels_for(a.isa);
  const KvConfig c(a.cache, tail_kind(a.tail_dtype));
  const Reader reader = check_row(c, kernels, a.pages, a.block_row, a.length);
  check_range(a.start, "start", 0, a.length);
  const int64_t count = a.length - a.start;
  const bool tailed = c.tail_bytes && a.length % kKvGroup != 0;
  if (tailed) check_tails(a.tails, a.tail_ids, 1, "sequence", c);
  FloatKind kind[2];
  for (const bool key : {true, false}) {
    const Tensor& t = key ? k : v;
    check_plain(t, key ? "k" : "v");
    check_shape(t, key ? "k" : "v", {count, c.heads, key ? c.keys.side.dim : c.values.side.dim});
    kind[key] = check_float(t, key ? "k" : "v");
  }
  const uint8_t* tail = nullptr;
  if (tailed) tail = static_cast<const uint8_t*>(a.tails->data_ptr()) +
                     *static_cast<const int32_t*>(a.tail_ids->data_ptr()) * c.tail_bytes;
  run_tasks(2 * c.heads, count * c.heads > 256, [&](int64_t task) {
    const bool key = task < c.heads;
    const int64_t head = key ? task : task - c.heads;
    const KvSideConfig& s = key ? c.keys : c.values;
    auto* out = static_cast<char*>((key ? k : v).data_ptr());
    alignas(64) float x[kKvMaxDim];
    for (int64_t i = 0; i < count; ++i) {
      const int64_t position = a.start + i;
      if (key && tail && position >= a.length - a.length % kKvGroup) reader.open(tail, head, position % kKvGroup, x);
      else reader.stored(s, key, head, position, x);
      const int64_t at = (i * c.heads + head) * s.side.dim;
      kernels.store(x, 1.0f, out + at * (kind[key] == kFloat32 ? 4 : 2), kind[key], s.side.dim);
    }
  });
}

void reopen(const ReadArguments& a) {
  const KvKernels& kernels = kv_kernels_for(a.isa);
  const KvConfig c(a.cache, tail_kind(a.tail_dtype));
  const Reader reader = check_row(c, kernels, a.pages, a.block_row, a.length);
  if (c.tail_bytes == 0) return;
  check_tails(a.tails, a.tail_ids, 1, "sequence", c);
  uint8_t* tail = static_cast<uint8_t*>(a.tails->data_ptr()) +
                  *static_cast<const int32_t*>(a.tail_ids->data_ptr()) * c.tail_bytes;
  alignas(64) float x[kKvMaxDim];
  alignas(64) uint32_t codes[kKvMaxDim];
  for (int64_t head = 0; head < c.heads; ++head) {
    for (int64_t position = a.length - a.length % kKvGroup; position < a.length; ++position) {
      const int64_t in_group = position % kKvGroup;
      reader.stored(c.keys, true, head, position, x);
      kv_narrow(kernels, c.tail, x, codes);
      put_codes(c.tail, true, tail + (head * 2 + in_group / kKvTile) * c.tail.tile_bytes, in_group % kKvTile, codes);
    }
  }
}

}  // namespace

void kv_read_op(StableIValue* stack, uint64_t inputs, uint64_t) {
  Args args(stack, inputs);
  const Tensor pages = args.tensor(), row = args.tensor();
  const int64_t start = args.integer(), length = args.integer();
  const auto tails = args.maybe_tensor(), tail_ids = args.maybe_tensor();
  const KvArguments cache = read_kv_arguments(args);
  const ScalarType dtype = args.scalar_type();
  const std::string isa = args.text();
  const Tensor k = args.tensor(), v = args.tensor();
  read({pages, row, start, length, tails, tail_ids, cache, dtype, isa}, k, v);
}

void kv_reopen_op(StableIValue* stack, uint64_t inputs, uint64_t) {
  Args args(stack, inputs);
  const Tensor pages = args.tensor(), row = args.tensor();
  const int64_t length = args.integer();
  const Tensor tails = args.tensor(), tail_ids = args.tensor();
  const KvArguments cache = read_kv_arguments(args);
  const ScalarType dtype = args.scalar_type();
  const std::string isa = args.text();
  reopen({pages, row, 0, length, tails, tail_ids, cache, dtype, isa});
}

void kv_sizes_op(StableIValue* stack, uint64_t inputs, uint64_t) {
  Args args(stack, inputs);
  const KvArguments cache = read_kv_arguments(args);
  const ScalarType dtype = args.scalar_type();
  const KvConfig c(cache, tail_kind(dtype));
  const Tensor sizes = new_tensor({2}, ScalarType::Long);
  auto* to = static_cast<int64_t*>(sizes.data_ptr());
  to[0] = c.page_bytes;
  to[1] = c.tail_bytes;
  put(stack, sizes);
}

}  // namespace hal_cpu
