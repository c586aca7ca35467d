// The packed layout `cpu.tile16`, both ways.
//
// Sixteen outputs form a tile; a tile is [words, 16] int32, one word holding consecutive k of one
// output: 8 codes of 4 bits in the order k0,k4,k1,k5,k2,k6,k3,k7 from the low end, or 4 of 8 bits
// in plain order. In that nibble order `w & 0x0f0f0f0f` and `(w >> 4) & 0x0f0f0f0f` are four
// consecutive k as bytes, which is the operand of the byte dot-product and tile instructions.
// What pads n and k is zero; the spare nibble of an odd k is carried as it is.
#include <emmintrin.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "args.h"
#include "checks.h"
#include "ops.h"
#include "parallel.h"

namespace hal_cpu {
namespace {

uint32_t spread(uint32_t nibbles) {
  nibbles = (nibbles | nibbles << 8) & 0x00ff00ffu;
  return (nibbles | nibbles << 4) & 0x0f0f0f0fu;
}

uint32_t gather(uint32_t bytes) {
  bytes = (bytes | bytes >> 4) & 0x00ff00ffu;
  return (bytes | bytes >> 8) & 0xffffu;
}

uint32_t interleave(uint32_t plain) { return spread(plain & 0xffffu) | spread(plain >> 16) << 4; }
uint32_t deinterleave(uint32_t word) {
  return gather(word & 0x0f0f0f0fu) | gather(word >> 4 & 0x0f0f0f0fu) << 16;
}

// interleave() of four words.
__m128i interleave(__m128i words) {
  const __m128i bytes = _mm_set1_epi32(0x00ff00ff), nibbles = _mm_set1_epi32(0x0f0f0f0f);
  const auto spread4 = [&](__m128i v) {
    v = _mm_and_si128(_mm_or_si128(v, _mm_slli_epi32(v, 8)), bytes);
    return _mm_and_si128(_mm_or_si128(v, _mm_slli_epi32(v, 4)), nibbles);
  };
  const __m128i low = spread4(_mm_and_si128(words, _mm_set1_epi32(0xffff)));
  return _mm_or_si128(low, _mm_slli_epi32(spread4(_mm_srli_epi32(words, 16)), 4));
}

// Four words of each of four rows, `bytes` apart, to four lanes of four words of the layout.
void pack_square(const uint8_t* rows, int64_t bytes, bool nibbles, uint32_t* out) {
  __m128i r[4];
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows + i * bytes));
    if (nibbles) r[i] = interleave(r[i]);
  }
  const __m128i a = _mm_unpacklo_epi32(r[0], r[1]), b = _mm_unpacklo_epi32(r[2], r[3]);
  const __m128i c = _mm_unpackhi_epi32(r[0], r[1]), d = _mm_unpackhi_epi32(r[2], r[3]);
  const __m128i lines[4] = {_mm_unpacklo_epi64(a, b), _mm_unpackhi_epi64(a, b),
                            _mm_unpacklo_epi64(c, d), _mm_unpackhi_epi64(c, d)};
  for (int i = 0; i < 4; ++i)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i * kTile), lines[i]);
}

int64_t row_bytes(int64_t k, int64_t bits) { return bits == 4 ? div_up(k, 2) : k; }

void check_bits(int64_t k, int64_t bits) {
  check_range(k, "k", 1, kMaxDim);
  if (bits != 4 && bits != 8) fail("bits is ", bits, "; expected 4 or 8");
}

void check_dims(const Tensor& t, const char* name, int64_t least) {
  check_plain(t, name);
  if (t.dim() < least || t.dim() > 8)
    fail(name, " has shape ", shape_text(t), "; expected ", least, " to 8 dimensions");
}

// Sizes of the leading (expert) dimensions and their product.
std::vector<int64_t> lead_shape(const Tensor& t, int64_t tail, int64_t* count) {
  std::vector<int64_t> shape;
  *count = 1;
  for (int64_t i = 0; i < t.dim() - tail; ++i) {
    shape.push_back(t.size(i));
    *count *= t.size(i);
  }
  return shape;
}

Tensor pack(const Tensor& values, int64_t k, int64_t bits) {
  check_bits(k, bits);
  check_dims(values, "values", 2);
  const ScalarType type = values.scalar_type();
  if (type != ScalarType::Byte && !(bits == 8 && type == ScalarType::Char))
    fail("values is ", type_text(type), "; expected uint8", bits == 8 ? " or int8" : "");
  const int64_t n = values.size(values.dim() - 2), bytes = row_bytes(k, bits);
  check_range(n, "n", 1, kMaxDim);
  if (values.size(values.dim() - 1) != bytes)
    fail("values has shape ", shape_text(values), "; expected a last dimension of ", bytes,
         " bytes for k=", k, " at ", bits, " bits");
  int64_t lead;
  std::vector<int64_t> shape = lead_shape(values, 2, &lead);
  const int64_t tiles = div_up(n, kTile), words = div_up(k, 32 / bits);
  shape.insert(shape.end(), {tiles, words, kTile});
  Tensor packed = new_weights(shape.data(), static_cast<int64_t>(shape.size()), ScalarType::Int);
  const auto* src = static_cast<const uint8_t*>(values.data_ptr());
  auto* dst = static_cast<uint32_t*>(packed.data_ptr());

  run_tasks(lead * tiles, lead * n * k > kWorthThreads, [&](int64_t task) {
    const int64_t row0 = task % tiles * kTile;
    uint32_t* out = dst + task * words * kTile;
    // Whole squares of a whole tile first; words and rows that are cut short one by one.
    const int64_t whole = row0 + kTile <= n ? bytes / 16 * 4 : 0;
    const uint8_t* first = src + (task / tiles * n + row0) * bytes;
    for (int64_t w = 0; w < whole; w += 4)
      for (int64_t lane = 0; lane < kTile; lane += 4)
        pack_square(first + lane * bytes + w * 4, bytes, bits == 4, out + w * kTile + lane);
    for (int64_t lane = 0; lane < kTile; ++lane) {
      const bool real = row0 + lane < n;
      const uint8_t* row = first + lane * bytes;
      for (int64_t w = whole; w < words; ++w) {
        uint32_t word = 0;
        if (real) std::memcpy(&word, row + w * 4, static_cast<size_t>(std::min<int64_t>(4, bytes - w * 4)));
        out[w * kTile + lane] = bits == 4 ? interleave(word) : word;
      }
    }
  });
  return packed;
}

Tensor unpack(const Tensor& packed, int64_t n, int64_t k, int64_t bits, bool as_signed) {
  check_bits(k, bits);
  check_range(n, "n", 1, kMaxDim);
  check_dims(packed, "packed", 3);
  check_type(packed, "packed", ScalarType::Int);
  if (as_signed && bits != 8) fail("signed is only for 8 bits; bits is ", bits);
  const int64_t tiles = div_up(n, kTile), words = div_up(k, 32 / bits), d = packed.dim();
  if (packed.size(d - 3) != tiles || packed.size(d - 2) != words || packed.size(d - 1) != kTile)
    fail("packed has shape ", shape_text(packed), "; expected [..., ", tiles, ", ", words, ", ",
         kTile, "] for n=", n, ", k=", k, " at ", bits, " bits");
  int64_t lead;
  std::vector<int64_t> shape = lead_shape(packed, 3, &lead);
  const int64_t bytes = row_bytes(k, bits);
  shape.insert(shape.end(), {n, bytes});
  Tensor values = new_tensor(shape.data(), static_cast<int64_t>(shape.size()),
                             as_signed ? ScalarType::Char : ScalarType::Byte);
  const auto* src = static_cast<const uint32_t*>(packed.data_ptr());
  auto* dst = static_cast<uint8_t*>(values.data_ptr());

  run_tasks(lead * tiles, lead * n * k > kWorthThreads, [&](int64_t task) {
    const int64_t row0 = task % tiles * kTile;
    const uint32_t* in = src + task * words * kTile;
    for (int64_t lane = 0; lane < kTile && row0 + lane < n; ++lane) {
      uint8_t* row = dst + (task / tiles * n + row0 + lane) * bytes;
      for (int64_t w = 0; w < words; ++w) {
        uint32_t word;
        std::memcpy(&word, in + w * kTile + lane, sizeof word);  // at any address
        if (bits == 4) word = deinterleave(word);
        std::memcpy(row + w * 4, &word, static_cast<size_t>(std::min<int64_t>(4, bytes - w * 4)));
      }
    }
  });
  return values;
}

int64_t group_size(const Tensor& t) {
  switch (t.scalar_type()) {
    case ScalarType::Byte:
      return 1;
    case ScalarType::Half:
    case ScalarType::BFloat16:
      return 2;
    case ScalarType::Float:
      return 4;
    default:
      fail("groups is ", type_text(t.scalar_type()),
           "; expected uint8, float16, bfloat16 or float32");
  }
}

// [.., N, G] to [.., tiles, G, 16] and back: the same index walk, copying one way or the other.
void move_groups(const char* plain, char* tiled, int64_t lead, int64_t n, int64_t g, int64_t size,
                 bool to_tiled) {
  const int64_t tiles = div_up(n, kTile);
  run_tasks(lead * tiles, lead * n * g > kWorthThreads, [&](int64_t task) {
    for (int64_t i = 0; i < g; ++i) {
      for (int64_t lane = 0; lane < kTile; ++lane) {
        const int64_t row = task % tiles * kTile + lane;
        char* cell = tiled + ((task * g + i) * kTile + lane) * size;
        const char* value = plain + ((task / tiles * n + row) * g + i) * size;
        const auto bytes = static_cast<size_t>(size);
        if (!to_tiled) {
          if (row < n) std::memcpy(const_cast<char*>(value), cell, bytes);
        } else if (row < n) {
          std::memcpy(cell, value, bytes);
        } else {
          std::memset(cell, 0, bytes);
        }
      }
    }
  });
}

Tensor pack_groups(const Tensor& groups) {
  check_dims(groups, "groups", 2);
  const int64_t size = group_size(groups), d = groups.dim();
  const int64_t n = groups.size(d - 2), g = groups.size(d - 1);
  check_range(n, "n", 1, kMaxDim);
  check_range(g, "the number of groups", 1, kMaxDim);
  int64_t lead;
  std::vector<int64_t> shape = lead_shape(groups, 2, &lead);
  shape.insert(shape.end(), {div_up(n, kTile), g, kTile});
  Tensor tiled =
      new_weights(shape.data(), static_cast<int64_t>(shape.size()), groups.scalar_type());
  move_groups(static_cast<const char*>(groups.data_ptr()), static_cast<char*>(tiled.data_ptr()),
              lead, n, g, size, true);
  return tiled;
}

Tensor unpack_groups(const Tensor& groups, int64_t n) {
  check_range(n, "n", 1, kMaxDim);
  check_dims(groups, "groups", 3);
  const int64_t size = group_size(groups), d = groups.dim();
  if (groups.size(d - 3) != div_up(n, kTile) || groups.size(d - 1) != kTile)
    fail("groups has shape ", shape_text(groups), "; expected [..., ", div_up(n, kTile), ", G, ",
         kTile, "] for n=", n);
  int64_t lead;
  std::vector<int64_t> shape = lead_shape(groups, 3, &lead);
  const int64_t g = groups.size(d - 2);
  shape.insert(shape.end(), {n, g});
  Tensor plain =
      new_tensor(shape.data(), static_cast<int64_t>(shape.size()), groups.scalar_type());
  move_groups(static_cast<const char*>(plain.data_ptr()), static_cast<char*>(groups.data_ptr()),
              lead, n, g, size, false);
  return plain;
}

// Packed tensors [tiles, ..] of several matrices, one behind the other.
Tensor join(const std::vector<Tensor>& parts) {
  if (parts.empty()) fail("parts has no tensors");
  const int64_t d = parts[0].dim();
  if (d < 1 || d > 8) fail("parts[0] has shape ", shape_text(parts[0]), "; expected 1 to 8 dimensions");
  std::vector<int64_t> shape(1, 0);
  for (int64_t i = 1; i < d; ++i) shape.push_back(parts[0].size(i));
  for (const Tensor& part : parts) {
    check_plain(part, "parts");
    check_type(part, "parts", parts[0].scalar_type());
    bool same = part.dim() == d;
    for (int64_t i = 1; same && i < d; ++i) same = part.size(i) == shape[static_cast<size_t>(i)];
    if (!same)
      fail("parts have shapes ", shape_text(parts[0]), " and ", shape_text(part),
           "; they may differ in the first size");
    shape[0] += part.size(0);
  }
  Tensor whole = new_weights(shape.data(), d, parts[0].scalar_type());
  auto* to = static_cast<char*>(whole.data_ptr());
  for (const Tensor& part : parts) {
    const auto bytes = static_cast<size_t>(part.numel() * part.element_size());
    if (bytes) std::memcpy(to, part.data_ptr(), bytes);  // an empty tensor may have no address
    to += bytes;
  }
  return whole;
}

}  // namespace

void join_op(StableIValue* stack, uint64_t inputs, uint64_t) {
  Args args(stack, inputs);
  put(stack, join(args.tensors()));
}

void pack_op(StableIValue* stack, uint64_t inputs, uint64_t) {
  Args args(stack, inputs);
  const Tensor values = args.tensor();
  const int64_t k = args.integer(), bits = args.integer();
  put(stack, pack(values, k, bits));
}

void unpack_op(StableIValue* stack, uint64_t inputs, uint64_t) {
  Args args(stack, inputs);
  const Tensor packed = args.tensor();
  const int64_t n = args.integer(), k = args.integer(), bits = args.integer();
  const bool as_signed = args.boolean();
  put(stack, unpack(packed, n, k, bits, as_signed));
}

void pack_groups_op(StableIValue* stack, uint64_t inputs, uint64_t) {
  Args args(stack, inputs);
  const Tensor groups = args.tensor();
  put(stack, pack_groups(groups));
}

void unpack_groups_op(StableIValue* stack, uint64_t inputs, uint64_t) {
  Args args(stack, inputs);
  const Tensor groups = args.tensor();
  const int64_t n = args.integer();
  put(stack, unpack_groups(groups, n));
}

}  // namespace hal_cpu
