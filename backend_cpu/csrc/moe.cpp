// Mixture of experts: gate and up, activation, down, weighted sum; exact like linear.
//
// Pairs of (token, slot) are sorted by expert, and a task is a few tiles of one expert for all of
// its rows, so an expert's weights are read once however many tokens chose it.
#include "moe_args.h"

#include <algorithm>

#include "block_moe.h"
#include "moe_routing.h"
#include "ops.h"
#include "parallel.h"

namespace hal_cpu {
namespace {

// Bound of the scratch one turn of tokens takes.
constexpr int64_t kScratchBytes = int64_t{64} << 20;

// fp32 rows of one matrix's input with their row pointers, one per sorted pair.
struct Inputs {
  const float** x = nullptr;
  const float** sums = nullptr;
  int planes = 0;

  Rows rows(const Band& b) const {
    return {x + b.begin, sums ? sums + b.begin : nullptr, b.count, planes};
  }
};

// A weighted row is a fp32 product whatever x is.
FloatKind input_kind(const MoeCall& c) { return c.weight_on_input ? kFloat32 : c.kind; }

class Turn {
 public:
  Turn(const MoeCall& call, int64_t first, int64_t tokens)
      : c(call),
        first_(first),
        tokens_(tokens),
        routing_(route(call.local.data() + first * call.slots, tokens * call.slots, call.experts)),
        pairs_(static_cast<int64_t>(routing_.order.size())),
        worth_(pairs_ * c.hidden * c.intermediate > kWorthThreads) {}

  // False if a permutation has an index out of range.
  bool run(char* out);
  static int64_t bytes_per_token(const MoeCall& c);

 private:
  const MoeCall& c;
  int64_t first_, tokens_;
  Routing routing_;
  int64_t pairs_;
  bool worth_;
  std::atomic<bool> inside_{true};

  bool same_sums() const {
    const Matrix &g = c.gate.first, &u = c.up.first;
    const bool needed = c.kernels.needs_sums(g);
    return needed == c.kernels.needs_sums(u) && (!needed || g.group == u.group);
  }
  bool per_pair() const { return c.weight_on_input || c.gate.perm || c.up.perm; }
  int64_t token(int64_t at) const { return routing_.order[static_cast<size_t>(at)] / c.slots; }
  float weight(int64_t pair) const { return c.weights[first_ * c.slots + pair]; }
  Inputs load(Scratch& s, const PackedMatrix& w);
  void add_sums(Scratch& s, const PackedMatrix& w, Inputs& in, int64_t rows, const float* data,
                int64_t stride, const std::vector<int32_t>& row_of);
  template <class F>
  void over_columns(int64_t n, const F& task);
  Inputs finish_hidden(Scratch& s, float* h, int64_t stride);
  void combine(const float* y, int64_t stride, char* out);
};

// Floats of a row with its planes, a whole number of tiles.
int64_t row_floats(int64_t n, int planes) {
  return round_up(n, kTile) + round_up(round_up(n, kTile) * planes / 2, kTile);
}

int64_t Turn::bytes_per_token(const MoeCall& c) {
  const int64_t input = row_floats(c.hidden, c.kernels.planes(input_kind(c)));
  const int64_t inner = row_floats(c.intermediate, c.kernels.planes(kFloat32));
  const int64_t hidden = row_floats(c.hidden, 0);
  const int64_t sums =
      (c.has_gate ? sums_per_row(c.gate.first) : 0) + sums_per_row(c.up.first) +
      sums_per_row(c.down.first);
  // An upper bound: as if gate and up had their own inputs, per pair, and down a permutation.
  const bool pair = c.weight_on_input || c.gate.perm || c.up.perm;
  const int64_t inputs = 2 * input * (pair ? c.slots : 1);
  const int64_t inner_rows = inner * (c.down.perm ? 2 : 1);
  return 4 * (inputs + c.slots * (inner_rows + hidden + sums)) + 64 * (c.slots + 1) + 1024;
}

// Rows of x as `w` wants them: one per token, or one per pair if they differ between pairs.
Inputs Turn::load(Scratch& s, const PackedMatrix& w) {
  const int planes = c.kernels.planes(input_kind(c));
  const int64_t stride = row_floats(c.hidden, planes);
  const bool pair = per_pair();
  const int64_t rows = pair ? pairs_ : tokens_;
  auto* data = s.take<float>(rows * stride);
  std::vector<int32_t> row_of(static_cast<size_t>(pairs_));
  std::vector<int32_t> expert_of(pair ? static_cast<size_t>(pairs_) : 0);
  for (const Band& b : routing_.experts) {
    for (int64_t at = b.begin; at < b.begin + b.count; ++at) {
      row_of[static_cast<size_t>(at)] = static_cast<int32_t>(pair ? at : token(at));
      if (pair) expert_of[static_cast<size_t>(at)] = static_cast<int32_t>(b.expert);
    }
  }
  run_tasks(rows, rows * stride > kWorthThreads, [&](int64_t r) {
    const int64_t t = pair ? token(r) : r;
    const int32_t* perm = pair ? w.expert_perm(expert_of[static_cast<size_t>(r)]) : nullptr;
    const float factor =
        c.weight_on_input ? weight(routing_.order[static_cast<size_t>(r)]) : 1.0f;
    if (!c.kernels.load_row(c.x + (first_ + t) * c.hidden * c.size, c.kind, perm, factor,
                            data + r * stride, c.hidden, round_up(c.hidden, kTile)))
      inside_ = false;
    c.kernels.split_row(data + r * stride, c.hidden, planes);
  });
  Inputs in;
  in.planes = planes;
  in.x = s.take<const float*>(pairs_);
  for (int64_t at = 0; at < pairs_; ++at)
    in.x[at] = data + row_of[static_cast<size_t>(at)] * stride;
  add_sums(s, w, in, rows, data, stride, row_of);
  return in;
}

void Turn::add_sums(Scratch& s, const PackedMatrix& w, Inputs& in, int64_t rows,
                    const float* data, int64_t stride, const std::vector<int32_t>& row_of) {
  in.sums = nullptr;
  if (!c.kernels.needs_sums(w.first)) return;
  const int64_t count = sums_per_row(w.first);
  auto* sums = s.take<float>(rows * count);
  in.sums = s.take<const float*>(pairs_);
  run_tasks(rows, rows * w.first.k > kWorthThreads, [&](int64_t r) {
    c.kernels.block_sums(data + r * stride, w.first.k, w.first.group, sums + r * count);
  });
  for (int64_t at = 0; at < pairs_; ++at)
    in.sums[at] = sums + (row_of.empty() ? at : row_of[static_cast<size_t>(at)]) * count;
}

// Calls task(band, tile, tiles) for every few tiles of every expert with rows.
template <class F>
void Turn::over_columns(int64_t n, const F& task) {
  const int64_t tiles = div_up(n, kTile), threads = torch::stable::get_num_threads();
  const auto experts = static_cast<int64_t>(routing_.experts.size());
  int64_t step = kTilesPerCall;
  while (step > 1 && experts * div_up(tiles, step) < 4 * threads) step /= 2;
  const int64_t run = run_length(experts * div_up(tiles, step), threads) * step;
  const int64_t columns = div_up(tiles, run);
  const bool few = experts * columns < 4 * threads;
  const std::vector<Band> bands = cut_bands(routing_.experts, few ? 64 : pairs_);
  run_tasks(static_cast<int64_t>(bands.size()) * columns, worth_, [&](int64_t i) {
    const int64_t first = i % columns * run, last = std::min(first + run, tiles);
    for (int64_t tile = first; tile < last; tile += step)
      task(bands[static_cast<size_t>(i / columns)], tile, std::min(step, last - tile));
  });
}

// The rows of `down`: h itself, or h in the order its permutation asks for.
Inputs Turn::finish_hidden(Scratch& s, float* h, int64_t stride) {
  const PackedMatrix& w = c.down;
  float* data = h;
  if (w.perm) {
    auto* ordered = s.take<float>(pairs_ * stride);
    for (const Band& b : routing_.experts) {
      run_tasks(b.count, b.count * stride > kWorthThreads, [&](int64_t i) {
        const int64_t at = b.begin + i;
        if (!c.kernels.load_row(h + at * stride, kFloat32, w.expert_perm(b.expert), 1.0f,
                                ordered + at * stride, c.intermediate,
                                round_up(c.intermediate, kTile)))
          inside_ = false;
      });
    }
    data = ordered;
  }
  Inputs in;
  in.planes = c.kernels.planes(kFloat32);
  in.x = s.take<const float*>(pairs_);
  for (int64_t at = 0; at < pairs_; ++at) in.x[at] = data + at * stride;
  run_tasks(in.planes ? pairs_ : 0, pairs_ * stride > kWorthThreads, [&](int64_t at) {
    c.kernels.split_row(data + at * stride, c.intermediate, in.planes);
  });
  add_sums(s, w, in, pairs_, data, stride, {});
  return in;
}

// Slots are summed in their order, whatever order their experts ran in.
void Turn::combine(const float* y, int64_t stride, char* out) {
  const int64_t results = c.reduce ? tokens_ : tokens_ * c.slots;
  const int64_t terms = c.reduce ? c.slots : 1;
  const int64_t base = c.reduce ? first_ : first_ * c.slots;
  // Long rows are cut, so that the threads share the work of a single token.
  constexpr int64_t kSpan = 1024;
  const int64_t spans = div_up(c.hidden, kSpan);
  run_tasks(results * spans, results * terms * c.hidden > kWorthThreads, [&](int64_t task) {
    const int64_t result = task / spans, begin = task % spans * kSpan;
    constexpr int64_t kTerms = 64;
    const float* rows[kTerms];
    float weights[kTerms];
    int64_t count = 0;
    std::vector<const float*> many_rows;
    std::vector<float> many_weights;
    const bool many = terms > kTerms;
    if (many) {
      many_rows.resize(static_cast<size_t>(terms));
      many_weights.resize(static_cast<size_t>(terms));
    }
    const float** r = many ? many_rows.data() : rows;
    float* w = many ? many_weights.data() : weights;
    for (int64_t j = 0; j < terms; ++j) {
      const int64_t pair = result * terms + j, at = routing_.position[static_cast<size_t>(pair)];
      if (at < 0) continue;
      r[count] = y + at * stride;
      w[count++] = c.weight_on_input ? 1.0f : weight(pair);
    }
    c.kernels.combine(r, w, count, c.scaling, out + (base + result) * c.hidden * c.out_size,
                      c.out_kind, begin, std::min(begin + kSpan, c.hidden));
  });
}

bool Turn::run(char* out) {
  const int64_t hidden = row_floats(c.hidden, 0);
  const int64_t inner = row_floats(c.intermediate, c.kernels.planes(kFloat32));
  Scratch scratch(static_cast<size_t>(bytes_per_token(c) * tokens_) + 4096);
  const Inputs up = load(scratch, c.up);
  Inputs gate = up;
  if (c.has_gate && (c.gate.perm || c.up.perm || !same_sums())) gate = load(scratch, c.gate);
  if (!inside_) return false;

  auto* h = scratch.take<float>(pairs_ * inner);
  auto** h_rows = scratch.take<float*>(pairs_);
  for (int64_t at = 0; at < pairs_; ++at) h_rows[at] = h + at * inner;
  over_columns(c.intermediate, [&](const Band& b, int64_t tile, int64_t tiles) {
    const Matrix up_w = c.up.expert(b.expert);
    const Matrix gate_w = c.has_gate ? c.gate.expert(b.expert) : up_w;
    c.kernels.gate_up(c.has_gate ? &gate_w : nullptr, up_w, tile, tiles, gate.rows(b), up.rows(b),
                      c.act, h_rows + b.begin);
  });

  const Inputs down = finish_hidden(scratch, h, inner);
  if (!inside_) return false;
  auto* y = scratch.take<float>(pairs_ * hidden);
  auto** y_rows = scratch.take<void*>(pairs_);
  for (int64_t at = 0; at < pairs_; ++at) y_rows[at] = y + at * hidden;
  over_columns(c.hidden, [&](const Band& b, int64_t tile, int64_t tiles) {
    c.kernels.linear(c.down.expert(b.expert), tile, tiles, down.rows(b), y_rows + b.begin,
                     kFloat32);
  });
  combine(y, hidden, out);
  return true;
}

// `given` may be null: then the result is made, in the dtype of x.
Tensor moe(const MoeArgs& a, const Tensor* given) {
  const bool named = names_blocks(a.isa);
  const BlockLevel level = named ? block_level(a.isa) : BlockLevel{};
  MoeCall c = check_moe(a);
  if (given) {
    check_plain(*given, "out");
    c.out_kind = check_float(*given, "out");
    c.out_size = c.out_kind == kFloat32 ? 4 : 2;
    if (c.reduce) check_shape(*given, "out", {c.tokens, c.hidden});
    else check_shape(*given, "out", {c.tokens, c.slots, c.hidden});
  }
  Tensor out = given      ? *given
               : c.reduce ? new_tensor({c.tokens, c.hidden}, a.x.scalar_type())
                          : new_tensor({c.tokens, c.slots, c.hidden}, a.x.scalar_type());
  auto* data = static_cast<char*>(out.data_ptr());
  // Few rows an expert are exact at the pace of memory.
  const int64_t most = std::min(c.experts, c.tokens * c.slots);
  if (named && (level.operand != kBf16 || c.tokens * c.slots >= kFewRows * most)) {
    block_moe(c, level, data);
    return out;
  }
  const int64_t turn = std::max<int64_t>(1, kScratchBytes / Turn::bytes_per_token(c));
  for (int64_t first = 0; first < c.tokens; first += turn) {
    if (!Turn(c, first, std::min(turn, c.tokens - first)).run(data))
      fail("a perm of an expert has an index outside its k");
  }
  return out;
}

}  // namespace

void moe_op(StableIValue* stack, uint64_t inputs, uint64_t) {
  Args args(stack, inputs);
  const MoeArgs a(args);
  put(stack, moe(a, nullptr));
}

void moe_out_op(StableIValue* stack, uint64_t inputs, uint64_t) {
  Args args(stack, inputs);
  const MoeArgs a(args);
  const Tensor out = args.tensor();
  moe(a, &out);
}

}  // namespace hal_cpu
