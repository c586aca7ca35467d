#include "checks.h"

#include <sys/mman.h>

#include <vector>

#include "args.h"
#include "error.h"

namespace hal_cpu {

PackedTensors read_packed(Args& args, bool required) {
  PackedTensors t;
  t.codes = required ? std::optional<Tensor>(args.tensor()) : args.maybe_tensor();
  t.scales = required ? std::optional<Tensor>(args.tensor()) : args.maybe_tensor();
  t.zeros = args.maybe_tensor();
  t.mins = args.maybe_tensor();
  t.perm = args.maybe_tensor();
  t.bias = args.maybe_tensor();
  return t;
}

std::string shape_text(const Tensor& t) {
  std::string text = "[";
  for (int64_t i = 0; i < t.dim(); ++i) {
    if (i) text += ", ";
    text += std::to_string(t.size(i));
  }
  return text + "]";
}

const char* type_text(ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return "float32";
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Char:
      return "int8";
    default:
      return "another dtype";
  }
}

void check_plain(const Tensor& t, const char* name) {
  if (!t.is_cpu()) fail(name, " is not a CPU tensor");
  if (!t.is_contiguous())
    fail(name, " of shape ", shape_text(t), " is not contiguous; call .contiguous() on it");
}

void check_type(const Tensor& t, const char* name, ScalarType type) {
  if (t.scalar_type() != type)
    fail(name, " is ", type_text(t.scalar_type()), "; expected ", type_text(type));
}

void check_shape(const Tensor& t, const char* name, std::initializer_list<int64_t> shape) {
  bool same = t.dim() == static_cast<int64_t>(shape.size());
  int64_t i = 0;
  for (int64_t size : shape) same = same && t.size(i++) == size;
  if (same) return;
  std::string wanted = "[";
  for (int64_t size : shape) wanted += (wanted.size() > 1 ? ", " : "") + std::to_string(size);
  fail(name, " has shape ", shape_text(t), "; expected ", wanted, "]");
}

FloatKind check_float(const Tensor& t, const char* name) {
  switch (t.scalar_type()) {
    case ScalarType::Float:
      return kFloat32;
    case ScalarType::Half:
      return kFloat16;
    case ScalarType::BFloat16:
      return kBFloat16;
    default:
      fail(name, " is ", type_text(t.scalar_type()), "; expected float32, float16 or bfloat16");
  }
}

void check_range(int64_t value, const char* name, int64_t low, int64_t high) {
  if (value < low || value > high)
    fail(name, " is ", value, "; expected ", low, " to ", high);
}

Tensor new_tensor(const int64_t* shape, int64_t dims, ScalarType type) {
  std::vector<int64_t> strides(static_cast<size_t>(dims));
  int64_t step = 1;
  for (int64_t i = dims; i-- > 0;) {
    strides[static_cast<size_t>(i)] = step;
    step *= shape[i] > 0 ? shape[i] : 1;
  }
  const auto shim_type = torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      dims, shape, strides.data(), shim_type, aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

Tensor new_weights(const int64_t* shape, int64_t dims, ScalarType type) {
  Tensor t = new_tensor(shape, dims, type);
  constexpr uintptr_t kHuge = uintptr_t{1} << 21;
  const auto begin = reinterpret_cast<uintptr_t>(t.data_ptr());
  const size_t bytes = static_cast<size_t>(t.numel()) * static_cast<size_t>(t.element_size());
  const uintptr_t first = (begin + kHuge - 1) / kHuge * kHuge, last = (begin + bytes) / kHuge * kHuge;
  // A refusal changes nothing but the rate.
  if (last > first) (void)madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
  return t;
}

Tensor new_tensor(std::initializer_list<int64_t> shape, ScalarType type) {
  return new_tensor(shape.begin(), static_cast<int64_t>(shape.size()), type);
}

namespace {

void check_lead(const Tensor& t, const std::string& name, int64_t experts,
                std::initializer_list<int64_t> tail) {
  check_plain(t, name.c_str());
  if (experts == 0) return check_shape(t, name.c_str(), tail);
  const int64_t* s = tail.begin();
  if (tail.size() == 1) return check_shape(t, name.c_str(), {experts, s[0]});
  check_shape(t, name.c_str(), {experts, s[0], s[1], s[2]});
}

int64_t float_size(FloatKind kind) { return kind == kFloat32 ? 4 : 2; }

const void* step_floats(const void* base, FloatKind kind, int64_t count) {
  return base ? static_cast<const char*>(base) + float_size(kind) * count : nullptr;
}

}  // namespace

Matrix PackedMatrix::expert(int64_t e) const {
  Matrix m = first;
  m.codes += e * code_step;
  m.scales = step_floats(m.scales, m.scale_kind, e * group_step);
  m.mins = step_floats(m.mins, m.min_kind, e * group_step);
  if (m.zeros) m.zeros += e * group_step;
  m.bias = step_floats(m.bias, m.bias_kind, e * m.n);
  return m;
}

PackedMatrix check_packed(const PackedTensors& t, const PackedSpec& s) {
  const std::string prefix = s.name;
  const auto named = [&](const char* part) { return prefix + part; };
  check_range(s.n, named("n").c_str(), 1, kMaxDim);
  check_range(s.k, named("k").c_str(), 1, kMaxDim);
  check_range(s.group, named("group").c_str(), 1, kMaxDim);
  if (s.bits != 4 && s.bits != 8) fail(named("bits"), " is ", s.bits, "; expected 4 or 8");
  const int64_t per_word = 32 / s.bits;
  if (s.group < s.k && s.group % per_word != 0)
    fail(named("group"), " ", s.group, " does not divide into whole words of ", per_word,
         " codes of ", s.bits, " bits");
  if (!t.codes || !t.scales) fail(named("packed"), " and ", named("scales"), " must both be given");

  PackedMatrix result;
  Matrix& m = result.first;
  m.n = s.n;
  m.k = s.k;
  m.bits = static_cast<int>(s.bits);
  m.words = div_up(s.k, per_word);
  m.groups = div_up(s.k, s.group);
  m.group = s.group < s.k ? s.group : s.k;
  const int64_t tiles = div_up(s.n, kTile);
  result.code_step = tiles * m.words * kTile;
  result.group_step = tiles * m.groups * kTile;

  check_type(*t.codes, named("packed").c_str(), ScalarType::Int);
  check_lead(*t.codes, named("packed"), s.experts, {tiles, m.words, kTile});
  m.codes = static_cast<const int32_t*>(t.codes->data_ptr());

  m.scale_kind = check_float(*t.scales, named("scales").c_str());
  check_lead(*t.scales, named("scales"), s.experts, {tiles, m.groups, kTile});
  m.scales = t.scales->data_ptr();

  if (t.zeros && t.mins) fail(named("zeros"), " and ", named("mins"), " exclude each other");
  if (t.zeros) {
    check_type(*t.zeros, named("zeros").c_str(), ScalarType::Byte);
    check_lead(*t.zeros, named("zeros"), s.experts, {tiles, m.groups, kTile});
    m.zeros = static_cast<const uint8_t*>(t.zeros->data_ptr());
    m.zero = kZeroInteger;
  } else if (t.mins) {
    m.min_kind = check_float(*t.mins, named("mins").c_str());
    check_lead(*t.mins, named("mins"), s.experts, {tiles, m.groups, kTile});
    m.mins = t.mins->data_ptr();
    m.zero = kZeroMinimum;
  }
  if (t.perm) {
    check_type(*t.perm, named("perm").c_str(), ScalarType::Int);
    check_lead(*t.perm, named("perm"), s.experts, {s.k});
    result.perm = static_cast<const int32_t*>(t.perm->data_ptr());
  }
  if (t.bias) {
    m.bias_kind = check_float(*t.bias, named("bias").c_str());
    check_lead(*t.bias, named("bias"), s.experts, {s.n});
    m.bias = t.bias->data_ptr();
  }
  return result;
}

int64_t sums_per_row(const Matrix& m) {
  const int64_t last = m.k - (m.groups - 1) * m.group;
  return (m.groups - 1) * div_up(m.group, kBlock) + div_up(last, kBlock);
}

}  // namespace hal_cpu
