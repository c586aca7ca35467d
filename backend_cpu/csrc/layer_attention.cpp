// The first half of a decoder layer: x + o(attention(q, k, v of norm(x))), with the new keys and values
// written behind the `held` tokens of a plain cache. Positions see all before them and themselves.
#include <algorithm>
#include <array>
#include <utility>

#include "layer_steps.h"
#include "ops.h"

namespace hal_cpu {
namespace {

// Query rows of one task over many positions, and the stretch of tokens of one task over a few.
constexpr int64_t kTaskRows = 192;
constexpr int64_t kStretch = 256;
constexpr int64_t kFewPositions = 2;
constexpr int64_t kMostDim = 256;

struct AttentionArgs {
  Tensor x, cos, sin, keys, values;
  int64_t held;
  Tensor norm;
  std::optional<Tensor> q_norm, k_norm;
  LayerMatrix q, k, v, o;
  int64_t heads;
  double eps, scale;

  explicit AttentionArgs(Args& args)
      : x(args.tensor()), cos(args.tensor()), sin(args.tensor()), keys(args.tensor()),
        values(args.tensor()), held(args.integer()), norm(args.tensor()), q_norm(args.maybe_tensor()),
        k_norm(args.maybe_tensor()), q(args), k(args), v(args), o(args), heads(args.integer()),
        eps(args.real()), scale(args.real()) {}
};

struct Heads {
  LayerRows x;
  int64_t batch, tokens, heads, kv_heads, dim, room, held;

  int64_t per_kv() const { return heads / kv_heads; }
  // The cache's place of a token of a kv head.
  int64_t at(int64_t b, int64_t head, int64_t token) const {
    return ((b * kv_heads + head) * room + token) * dim * x.size();
  }
};

// The matrices over the input, and how many values a row they give.
std::pair<std::array<LayerMatrix*, 3>, std::array<int64_t, 3>> three(AttentionArgs& a, const Heads& h) {
  return {{&a.q, &a.k, &a.v}, {h.heads * h.dim, h.kv_heads * h.dim, h.kv_heads * h.dim}};
}

Heads check_attention(AttentionArgs& a) {
  const LayerRows x = check_rows(a.x);
  const ScalarType type = a.x.scalar_type();
  Heads h{x, a.x.size(0), a.x.size(1), a.heads, 0, 0, 0, a.held};
  check_vector(a.norm, "norm", x.width, type);
  check_plain(a.keys, "keys");
  check_type(a.keys, "keys", type);
  if (a.keys.dim() != 4) fail("keys has shape ", shape_text(a.keys), "; expected [batch, heads, room, dim]");
  check_range(a.heads, "heads", 1, kMaxDim);
  h.kv_heads = a.keys.size(1), h.room = a.keys.size(2), h.dim = a.keys.size(3);
  check_range(h.kv_heads, "heads of keys", 1, a.heads);
  check_range(h.dim, "dim", kTile, kMostDim);
  if (h.dim % kTile) fail("dim is ", h.dim, "; expected a multiple of ", kTile);
  if (a.heads % h.kv_heads) fail("heads is ", a.heads, "; expected a multiple of the ", h.kv_heads, " of keys");
  check_shape(a.keys, "keys", {h.batch, h.kv_heads, h.room, h.dim});
  check_plain(a.values, "values");
  check_type(a.values, "values", type);
  check_shape(a.values, "values", {h.batch, h.kv_heads, h.room, h.dim});
  check_range(a.held, "held", 0, h.room - h.tokens);
  for (const auto& [t, name] : {std::pair{&a.cos, "cos"}, std::pair{&a.sin, "sin"}}) {
    check_plain(*t, name);
    check_type(*t, name, type);
    check_shape(*t, name, {a.cos.dim() && a.cos.size(0) == 1 ? 1 : h.batch, h.tokens, h.dim});
  }
  if (a.q_norm) check_vector(*a.q_norm, "q_norm", h.dim, type);
  if (a.k_norm) check_vector(*a.k_norm, "k_norm", h.dim, type);
  const auto [matrices, widths] = three(a, h);
  const char* const names[] = {"q_", "k_", "v_"};
  check_matrices(matrices.data(), names, widths.data(), 3, x.width);
  a.o.check("o_", x.width, a.heads * h.dim);
  return h;
}

// Rotates queries in place, and keys and values into the cache. `from`: where these three are.
void place_rows(const AttentionArgs& a, const Heads& h, const Columns* from) {
  const LayerKernels& kernels = layer_kernels();
  const int64_t step = h.dim * h.x.size();
  const auto eps = static_cast<float>(a.eps);
  auto* keys = static_cast<char*>(a.keys.data_ptr());
  auto* values = static_cast<char*>(a.values.data_ptr());
  run_rows(h.x.count, (h.heads + h.kv_heads) * h.dim, [&](int64_t r) {
    const int64_t b = r / h.tokens, token = r % h.tokens;
    const int64_t angle = (a.cos.size(0) == 1 ? token : r) * step;
    const auto row = [&](int64_t i) { return from[i].data + r * from[i].step; };
    char *q = row(0), *k = row(1), *v = row(2);
    const auto turn = [&](char* head, const std::optional<Tensor>& norm, char* to) {
      if (norm) kernels.norm(head, norm->data_ptr(), eps, head, h.x.kind, h.dim);
      kernels.rotate(head, static_cast<const char*>(a.cos.data_ptr()) + angle,
                     static_cast<const char*>(a.sin.data_ptr()) + angle, to, h.x.kind, h.dim);
    };
    for (int64_t i = 0; i < h.heads; ++i) turn(q + i * step, a.q_norm, q + i * step);
    for (int64_t i = 0; i < h.kv_heads; ++i) {
      const int64_t at = h.at(b, i, h.held + token);
      turn(k + i * step, a.k_norm, keys + at);
      std::copy_n(v + i * step, step, values + at);
    }
  });
}

// Positions [first, first + count) of one kv head.
struct Unit {
  int64_t b, head, first, count;
};

Attend attend_of(const AttentionArgs& a, const Heads& h, const Unit& u, const Columns& q, char* out) {
  const int64_t at = h.at(u.b, u.head, 0), row = u.b * h.tokens + u.first, size = h.x.size();
  const int64_t first = u.head * h.per_kv() * h.dim * size, step = h.heads * h.dim;
  return {h.x.kind, q.data + row * q.step + first, out + row * step * size + first, q.step / size, step,
          static_cast<const char*>(a.keys.data_ptr()) + at,
          static_cast<const char*>(a.values.data_ptr()) + at,
          h.dim, h.per_kv(), u.count * h.per_kv(), h.held + u.first + 1, static_cast<float>(a.scale)};
}

// max, sum and acc of one stretch, in one piece of memory.
int64_t sums_floats(int64_t rows, int64_t dim) { return 2 * round_up(rows, kTile) + rows * dim; }
AttendSums sums_at(float* p, int64_t rows) { return {p, p + round_up(rows, kTile), p + 2 * round_up(rows, kTile)}; }

// Many positions: a task attends from a few of them to all that they see.
void attend_many(const AttentionArgs& a, const Heads& h, const Columns& q, char* out) {
  const LayerKernels& kernels = layer_kernels();
  const int64_t step = std::max<int64_t>(1, kTaskRows / h.per_kv()), bands = div_up(h.tokens, step);
  const int64_t rows = step * h.per_kv();
  run_tasks(h.batch * h.kv_heads * bands, true, [&](int64_t task) {
    // The last positions see most: they come first, so that threads end together.
    const int64_t pair = task % (h.batch * h.kv_heads), first = (bands - 1 - task / (h.batch * h.kv_heads)) * step;
    const Unit u{pair / h.kv_heads, pair % h.kv_heads, first, std::min(step, h.tokens - first)};
    const Attend own = attend_of(a, h, u, q, out);
    const int64_t sums = sums_floats(rows, h.dim), work = kernels.attend_floats(rows, h.dim);
    const auto bytes = [](int64_t n) { return TaskScratch::bytes_for(static_cast<size_t>(n), 4); };
    TaskScratch scratch(bytes(sums) + bytes(work));
    const AttendSums to = sums_at(scratch.take<float>(sums), rows);
    kernels.attend(own, 0, own.seen + u.count - 1, to, scratch.take<float>(work));
    kernels.finish(own, to, 1, 0);
  });
}

// Few positions: a task attends to one stretch of tokens, whatever the number of threads.
void attend_few(const AttentionArgs& a, const Heads& h, const Columns& q, char* out) {
  const LayerKernels& kernels = layer_kernels();
  const int64_t pairs = h.batch * h.kv_heads, rows = h.tokens * h.per_kv(), total = h.held + h.tokens;
  const int64_t stretches = div_up(total, kStretch), step = sums_floats(rows, h.dim);
  Scratch scratch(Scratch::bytes_for(static_cast<size_t>(pairs * stretches * step), 4));
  auto* sums = scratch.take<float>(pairs * stretches * step);
  const auto unit = [&](int64_t pair) {
    return attend_of(a, h, {pair / h.kv_heads, pair % h.kv_heads, 0, h.tokens}, q, out);
  };
  run_tasks(pairs * stretches, pairs * rows * total * h.dim > kWorthEncoding, [&](int64_t task) {
    const int64_t begin = task % stretches * kStretch, work = kernels.attend_floats(rows, h.dim);
    TaskScratch own(TaskScratch::bytes_for(static_cast<size_t>(work), 4));
    kernels.attend(unit(task / stretches), begin, std::min(begin + kStretch, total), sums_at(sums + task * step, rows),
                   own.take<float>(work));
  });
  for (int64_t pair = 0; pair < pairs; ++pair)
    kernels.finish(unit(pair), sums_at(sums + pair * stretches * step, rows), stretches, step);
}

Tensor attention(AttentionArgs& a) {
  const Heads h = check_attention(a);
  const LayerRows& x = h.x;
  Tensor out = new_tensor({h.batch, h.tokens, x.width}, a.x.scalar_type());
  if (x.count == 0) return out;
  const auto [matrices, widths] = three(a, h);
  const int64_t narrow = x.bytes(x.width), wide = x.bytes(widths[0]), all = x.bytes(widths[0] + widths[1] + widths[2]);
  const auto bytes = [](int64_t n) { return LayerScratch::bytes_for(static_cast<size_t>(n), 1); };
  LayerScratch scratch(bytes(narrow) + bytes(wide) + bytes(all));
  auto* normed = scratch.take<char>(narrow);
  auto* attended = scratch.take<char>(wide);
  auto* memory = scratch.take<char>(all);

  norm_rows(x, a.norm, a.eps, normed);
  Columns from[3];
  run_matrices(matrices.data(), widths.data(), 3, normed, x.kind, x.count, memory, from);
  place_rows(a, h, from);
  if (h.tokens < kFewPositions) attend_few(a, h, from[0], attended);
  else attend_many(a, h, from[0], attended);
  a.o.run(attended, x.kind, x.count, normed);
  add_rows(x, normed, static_cast<char*>(out.data_ptr()));
  return out;
}

}  // namespace

void attention_op(StableIValue* stack, uint64_t inputs, uint64_t) {
  Args args(stack, inputs);
  AttentionArgs a(args);
  put(stack, attention(a));
}

}  // namespace hal_cpu
