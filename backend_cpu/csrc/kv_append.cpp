// Tokens into pages: the canonical quantization, then each code to its place.
#include <algorithm>
#include <vector>

#include "error.h"
#include "kv_config.h"
#include "kv_ops.h"
#include "parallel.h"

namespace hal_cpu {
namespace {

struct Rows {
  const char* data;
  FloatKind kind;
  int64_t heads, dim;

  const void* at(int64_t token, int64_t head) const {
    return data + (token * heads + head) * dim * (kind == kFloat32 ? 4 : 2);
  }
};

Rows check_rows(const Tensor& t, const char* name, int64_t tokens, int64_t heads, int64_t dim) {
  check_plain(t, name);
  check_shape(t, name, {tokens, heads, dim});
  return {static_cast<const char*>(t.data_ptr()), check_float(t, name), heads, dim};
}

// In range and without repeats; nothing may be written before this.
void check_slots(const int64_t* slots, int64_t count, int64_t limit) {
  std::vector<int64_t> sorted;
  sorted.reserve(static_cast<size_t>(count));
  bool rising = true;
  for (int64_t i = 0; i < count; ++i) {
    if (slots[i] == -1) continue;
    if (slots[i] < 0 || slots[i] >= limit)
      fail("slots[", i, "] is ", slots[i], "; expected -1 or 0 to ", limit - 1);
    rising = rising && (sorted.empty() || sorted.back() < slots[i]);
    sorted.push_back(slots[i]);
  }
  if (rising) return;
  std::sort(sorted.begin(), sorted.end());
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice != sorted.end()) fail("slot ", *twice, " is given twice");
}

// Groups close when their last token comes: a sequence's tokens must come in order, none left out.
void check_order(const int64_t* slots, const int32_t* ids, int64_t count, int64_t tails) {
  std::vector<int64_t> last(static_cast<size_t>(tails), -1);
  for (int64_t i = 0; i < count; ++i) {
    if (slots[i] < 0) continue;
    int64_t& before = last[static_cast<size_t>(ids[i])];
    if (before >= 0 && slots[i] % kKvGroup != (before + 1) % kKvGroup)
      fail("slots[", i, "] is ", slots[i], " after slot ", before, " of tail ", ids[i],
           "; give a sequence's tokens in order, groups of ", kKvGroup, " are closed by their last");
    before = slots[i];
  }
}

// What one thread needs to store the tokens of one head.
struct Buffers {
  alignas(64) float x[kKvMaxDim];
  alignas(64) float unit[4 * kKvMaxDim];
  alignas(64) float rotated[4 * kKvMaxDim];
  alignas(64) uint32_t codes[kKvGroup * kKvMaxDim];
  alignas(64) float group[kKvGroup * kKvMaxDim];
  alignas(64) uint16_t scales[2 * kKvMaxDim];
};

struct Appender {
  const KvConfig& c;
  const KvKernels& kernels;
  uint8_t* pages;
  const int64_t* slots;
  int64_t tokens;

  uint8_t* page(int64_t slot) const { return pages + slot / c.page_size * c.page_bytes; }

  void store(const KvSideConfig& s, bool key, int64_t head, int64_t slot, const Buffers& b) const {
    const KvPlace at = kv_place(s.side, head, slot % c.page_size);
    uint8_t* to = page(slot);
    put_codes(s.side, key, to + at.tile, at.token, b.codes);
    auto* scales = reinterpret_cast<uint16_t*>(to + at.scales) + at.token;
    if (s.side.scales == kKvToken || s.side.scales == kKvTokenMin) scales[0] = b.scales[0];
    if (s.side.scales == kKvTokenMin) scales[kKvTile] = b.scales[1];
  }

  void plain(const KvSideConfig& s, bool key, const Rows& rows, int64_t head, Buffers& b) const {
    const float factor = 1.0f / s.head_scale(head);
    for (int64_t t = 0; t < tokens; ++t) {
      if (slots[t] < 0) continue;
      kernels.load(rows.at(t, head), rows.kind, 1.0f, b.x, rows.dim);
      kernels.quantize(s.side, b.x, factor, b.codes, b.scales);
      store(s, key, head, slots[t], b);
    }
  }

  // Four vectors share a pass over the rotation.
  void rotated(const KvSideConfig& s, bool key, const Rows& rows, int64_t head, Buffers& b) const {
    for (int64_t t = 0; t < tokens;) {
      int64_t slot[4];
      float length[4];
      int64_t count = 0;
      for (; t < tokens && count < 4; ++t) {
        if (slots[t] < 0) continue;
        kernels.load(rows.at(t, head), rows.kind, 1.0f, b.x, rows.dim);
        length[count] = kernels.direction(b.x, b.unit + count * rows.dim, rows.dim);
        slot[count++] = slots[t];
      }
      kernels.rotate(b.unit, s.to_rotated, b.rotated, count, rows.dim);
      for (int64_t i = 0; i < count; ++i) {
        kernels.quantize_rotated(s.side, b.rotated + i * rows.dim, length[i], s.correct, b.codes, b.scales);
        store(s, key, head, slot[i], b);
      }
    }
  }

  // Keys wait in their sequence's tail; the one that fills a group lets all 32 be quantized.
  void grouped(const Rows& rows, int64_t head, uint8_t* tails, const int32_t* ids, Buffers& b) const {
    const KvSide& tail = c.tail;
    for (int64_t t = 0; t < tokens; ++t) {
      if (slots[t] < 0) continue;
      uint8_t* open = tails + ids[t] * c.tail_bytes + head * 2 * tail.tile_bytes;
      const int64_t in_group = slots[t] % c.page_size % kKvGroup;
      kernels.load(rows.at(t, head), rows.kind, 1.0f, b.x, rows.dim);
      kv_narrow(kernels, tail, b.x, b.codes);
      put_codes(tail, true, open + in_group / kKvTile * tail.tile_bytes, in_group % kKvTile, b.codes);
      if (in_group == kKvGroup - 1) close(head, slots[t] - in_group, open, b);
    }
  }

  void close(int64_t head, int64_t slot, const uint8_t* open, Buffers& b) const {
    const KvSide& side = c.keys.side;
    for (int64_t i = 0; i < kKvGroup; ++i) {
      get_codes(c.tail, true, open + i / kKvTile * c.tail.tile_bytes, i % kKvTile, b.codes);
      kv_widen(kernels, c.tail, b.codes, b.group + i * side.dim);
    }
    kernels.quantize_group(side, b.group, b.codes, b.scales);
    for (int64_t i = 0; i < kKvGroup; ++i) {
      const KvPlace at = kv_place(side, head, (slot + i) % c.page_size);
      put_codes(side, true, page(slot) + at.tile, at.token, b.codes + i * side.dim);
    }
    const KvPlace at = kv_place(side, head, slot % c.page_size);
    std::copy(b.scales, b.scales + side.scales_bytes / 2, reinterpret_cast<uint16_t*>(page(slot) + at.scales));
  }
};

void append(const Tensor& pages, const Tensor& k, const Tensor& v, const Tensor& slots,
            const std::optional<Tensor>& tails, const std::optional<Tensor>& tail_ids,
            const KvArguments& arguments, const std::string& isa) {
  const KvKernels& kernels = kv_kernels_for(isa);
  const KvConfig c(arguments, check_float(k, "k"));
  check_pages(pages, c);
  check_plain(slots, "slots");
  check_type(slots, "slots", ScalarType::Long);
  if (slots.dim() != 1) fail("slots has shape ", shape_text(slots), "; expected [tokens]");
  const int64_t tokens = slots.size(0);
  const Rows keys = check_rows(k, "k", tokens, c.heads, c.keys.side.dim);
  const Rows values = check_rows(v, "v", tokens, c.heads, c.values.side.dim);
  if (keys.kind != values.kind)
    fail("k is ", type_text(k.scalar_type()), " and v is ", type_text(v.scalar_type()), "; expected one type");
  check_tails(tails, tail_ids, tokens, "token", c);
  const Appender a{c, kernels, static_cast<uint8_t*>(pages.data_ptr()),
                   static_cast<const int64_t*>(slots.data_ptr()), tokens};
  check_slots(a.slots, tokens, pages.size(0) * c.page_size);
  auto* tail = tails && c.tail_bytes ? static_cast<uint8_t*>(tails->data_ptr()) : nullptr;
  const auto* ids = tail ? static_cast<const int32_t*>(tail_ids->data_ptr()) : nullptr;
  if (tail) check_order(a.slots, ids, tokens, tails->size(0));
  // A head and a side are no other task's.
  run_tasks(2 * c.heads, tokens * c.heads * keys.dim > 1 << 14, [&](int64_t task) {
    Scratch scratch(Scratch::bytes_for(1, sizeof(Buffers)));
    Buffers& b = *scratch.take<Buffers>(1);
    const bool key = task < c.heads;
    const int64_t head = key ? task : task - c.heads;
    const KvSideConfig& side = key ? c.keys : c.values;
    if (key && c.keys.grouped()) a.grouped(keys, head, tail, ids, b);
    else if (side.to_rotated) a.rotated(side, key, key ? keys : values, head, b);
    else a.plain(side, key, key ? keys : values, head, b);
  });
}

}  // namespace

void kv_append_op(StableIValue* stack, uint64_t inputs, uint64_t) {
  Args args(stack, inputs);
  const Tensor pages = args.tensor(), k = args.tensor(), v = args.tensor(), slots = args.tensor();
  const auto tails = args.maybe_tensor(), tail_ids = args.maybe_tensor();
  const KvArguments arguments = read_kv_arguments(args);
  const std::string isa = args.text();
  append(pages, k, v, slots, tails, tail_ids, arguments, isa);
}

}  // namespace hal_cpu
