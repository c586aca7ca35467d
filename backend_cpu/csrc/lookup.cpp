// Rows of a packed matrix, dequantized: an embedding table. Each value is the definition itself,
// (q - zero) * scale or q * scale + min in fp32 without contraction, rounded once to the result's
// dtype. Built for baseline x86-64: a row is short, and scattered loads bound it.
#include <bit>
#include <cstring>

#include "args.h"
#include "checks.h"
#include "ops.h"
#include "parallel.h"

namespace hal_cpu {
namespace {

float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t exponent = h >> 10 & 0x1fu, mantissa = h & 0x3ffu;
  if (exponent == 0x1f) return std::bit_cast<float>(sign | 0x7f800000u | mantissa << 13);
  if (exponent != 0) return std::bit_cast<float>(sign | (exponent + 112) << 23 | mantissa << 13);
  const float small = static_cast<float>(mantissa) * 0x1p-24f;
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(small));
}

uint16_t float_to_half(float f) {
  const uint32_t bits = std::bit_cast<uint32_t>(f);
  const uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (magnitude < 0x38800000u) {
    // Adding 0.5 leaves a subnormal half in the low mantissa bits, rounded by the hardware.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000u));
  }
  const uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
  return static_cast<uint16_t>(sign | (rounded - 0x38000000u) >> 13);
}

uint16_t float_to_bf16(float f) {
  const uint32_t bits = std::bit_cast<uint32_t>(f);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0u;
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

float read_float(const void* base, FloatKind kind, int64_t i) {
  if (kind == kFloat32) return static_cast<const float*>(base)[i];
  const uint16_t bits = static_cast<const uint16_t*>(base)[i];
  if (kind == kFloat16) return half_to_float(bits);
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

void write_float(void* base, FloatKind kind, int64_t i, float value) {
  if (kind == kFloat32) static_cast<float*>(base)[i] = value;
  else if (kind == kFloat16) static_cast<uint16_t*>(base)[i] = float_to_half(value);
  else static_cast<uint16_t*>(base)[i] = float_to_bf16(value);
}

int code_at(const Matrix& m, const int32_t* column, int64_t k) {
  if (m.bits == 8) {
    const uint32_t byte = static_cast<uint32_t>(column[k / 4 * kTile]) >> 8 * (k % 4) & 0xffu;
    return m.zero == kZeroNone ? static_cast<int8_t>(byte) : static_cast<int>(byte);
  }
  const int64_t nibble = k % 8 < 4 ? k % 8 * 2 : (k % 8 - 4) * 2 + 1;
  const auto code =
      static_cast<int>(static_cast<uint32_t>(column[k / 8 * kTile]) >> 4 * nibble & 0xfu);
  return m.zero == kZeroNone ? (code ^ 8) - 8 : code;
}

void expand_row(const Matrix& m, const int32_t* perm, int64_t row, void* out, FloatKind kind) {
  const int64_t tile = row / kTile, lane = row % kTile;
  const int32_t* column = m.codes + tile * m.words * kTile + lane;
  // A perm that names an input twice leaves another out; that one must not be stale memory.
  if (perm) std::memset(out, 0, static_cast<size_t>(m.k * (kind == kFloat32 ? 4 : 2)));
  for (int64_t g = 0; g < m.groups; ++g) {
    const int64_t at = (tile * m.groups + g) * kTile + lane;
    const float scale = read_float(m.scales, m.scale_kind, at);
    const float minimum = m.mins ? read_float(m.mins, m.min_kind, at) : 0.0f;
    const int zero = m.zeros ? m.zeros[at] : 0;
    const int64_t end = g + 1 < m.groups ? (g + 1) * m.group : m.k;
    for (int64_t k = g * m.group; k < end; ++k) {
      float value = static_cast<float>(code_at(m, column, k) - zero) * scale;
      // Only where there is one: adding 0 would lose the sign of -0.
      if (m.mins) value = value + minimum;
      // Packed column k stands for input perm[k].
      write_float(out, kind, perm ? perm[k] : k, value);
    }
  }
}

Tensor lookup(const Tensor& ids, const PackedTensors& packed, const PackedSpec& spec,
              ScalarType type) {
  check_plain(ids, "ids");
  check_type(ids, "ids", ScalarType::Long);
  if (ids.dim() > 7) fail("ids has shape ", shape_text(ids), "; expected at most 7 dimensions");
  const PackedMatrix w = check_packed(packed, spec);
  const Matrix& m = w.first;
  if (w.perm) {
    for (int64_t i = 0; i < m.k; ++i)
      if (w.perm[i] < 0 || w.perm[i] >= m.k)
        fail("perm[", i, "] is ", w.perm[i], "; expected 0 to ", m.k - 1);
  }
  const int64_t count = ids.numel(), d = ids.dim();
  const auto* id = static_cast<const int64_t*>(ids.data_ptr());
  for (int64_t i = 0; i < count; ++i)
    if (id[i] < 0 || id[i] >= m.n)
      fail("ids[", i, "] (flattened) is ", id[i], "; expected 0 to ", m.n - 1);

  int64_t shape[8];
  for (int64_t i = 0; i < d; ++i) shape[i] = ids.size(i);
  shape[d] = m.k;
  if (type != ScalarType::Float && type != ScalarType::Half && type != ScalarType::BFloat16)
    fail("dtype is ", type_text(type), "; expected float32, float16 or bfloat16");
  Tensor out = new_tensor(shape, d + 1, type);
  const FloatKind kind = check_float(out, "out");
  auto* data = static_cast<char*>(out.data_ptr());
  const int64_t size = kind == kFloat32 ? 4 : 2;
  run_tasks(count, count * m.k * 8 > kWorthThreads, [&](int64_t i) {
    expand_row(m, w.perm, id[i], data + i * m.k * size, kind);
  });
  return out;
}

}  // namespace

void lookup_op(StableIValue* stack, uint64_t inputs, uint64_t) {
  Args args(stack, inputs);
  const Tensor ids = args.tensor();
  PackedTensors w;
  w.codes = args.tensor();
  w.scales = args.tensor();
  w.zeros = args.maybe_tensor();
  w.mins = args.maybe_tensor();
  w.perm = args.maybe_tensor();
  const int64_t n = args.integer(), k = args.integer();
  const int64_t group = args.integer(), bits = args.integer();
  const ScalarType type = args.scalar_type();
  put(stack, lookup(ids, w, {"", 0, n, k, group, bits}, type));
}

}  // namespace hal_cpu
