// A token becomes a record once, and a copy of it for each of its experts, sorted by expert. With
// many rows a task is one expert's rows, which it copies itself, from gate and up to the records of
// their hidden rows; with few it is some of their columns. `down` is cut by columns alone: a task
// adds the weighted results of all experts for its columns, in order of expert, so that no two tasks
// share a sum and no result is kept per expert.
#include "block_moe.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "moe_routing.h"
#include "parallel.h"

namespace hal_cpu {
namespace {

// Bound of the records one turn of tokens takes.
constexpr int64_t kRecordBytes = int64_t{64} << 20;

// Floats of weighted sums that stay near the core which adds them: half a second cache. The wider they
// are, the fewer times all hidden rows are read.
constexpr int64_t kSumFloats = int64_t{1} << 18;

// Records of one matrix's inputs, one per sorted pair or one per token.
struct Inputs {
  Records form;
  char* records = nullptr;
  bool of_tokens = false;

  BlockRows rows(const Band& b) const { return {records + b.begin * form.stride, b.count}; }
};

class BlockTurn {
 public:
  BlockTurn(const MoeCall& call, const BlockLevel& level, int64_t first, int64_t tokens)
      : c(call),
        kernels_(*level.kernels),
        first_(first),
        tokens_(tokens),
        routing_(route(call.local.data() + first * call.slots, tokens * call.slots, call.experts)),
        bands_(cut_bands(routing_.experts, kBand)),
        pairs_(static_cast<int64_t>(routing_.order.size())),
        h_step_(round_up(call.intermediate, kTile)),
        threads_(torch::stable::get_num_threads()),
        worth_(pairs_ * c.hidden * c.intermediate > kWorthThreads),
        by_expert_(static_cast<int64_t>(bands_.size()) >= 8 * threads_) {
    // For few rows an expert the weights stay as they are.
    const auto experts = static_cast<int64_t>(routing_.experts.size());
    const bool few = level.operand == kInt8Rescaled && pairs_ < few_rescaled(c.up.first) * experts;
    operand_ = few ? kInt8Token : level.operand;
  }

  // False if a permutation has an index out of range.
  bool run(char* out);
  static int64_t bytes_per_token(const MoeCall& c, Operand operand);

 private:
  const MoeCall& c;
  const BlockKernels& kernels_;
  Operand operand_;
  int64_t first_, tokens_;
  Routing routing_;
  std::vector<Band> bands_;
  int64_t pairs_, h_step_, threads_;
  bool worth_, by_expert_;
  std::atomic<bool> inside_{true};

  float weight(int64_t pair) const { return c.weights[first_ * c.slots + pair]; }
  const char* row_of_x(int64_t token) const {
    return c.x + (first_ + token) * c.hidden * c.size;
  }
  void encode(const void* row, FloatKind kind, const int32_t* perm, float factor, int64_t k,
              const Records& form, char* record);
  Inputs load(Scratch& s, const PackedMatrix& w);
  void load_pairs(const PackedMatrix& w, const Inputs& in, bool worth);
  BlockRows own_rows(const Inputs& in, const Band& b, TaskScratch& s) const;
  void gate_up(const Band& b, int64_t tile, int64_t tiles, const Inputs& gate,
               const BlockRows& gate_rows, const Inputs& up, const BlockRows& up_rows, float* work,
               float* h);
  void encode_hidden(int64_t at, int64_t expert, const float* h, const Inputs& down);
  void by_expert(const Inputs& gate, const Inputs& up, const Inputs& down);
  void by_column(const Inputs& gate, const Inputs& up, const Inputs& down);
  void down(const Inputs& in, char* out);
};

int64_t BlockTurn::bytes_per_token(const MoeCall& c, Operand operand) {
  const auto size = [&](const PackedMatrix& w) { return records_for(w.first, operand).stride; };
  const int64_t inputs = (c.has_gate ? size(c.gate) : 0) + size(c.up) + size(c.down);
  return c.slots * (inputs + 16) + 64;
}

void BlockTurn::encode(const void* row, FloatKind kind, const int32_t* perm, float factor,
                       int64_t k, const Records& form, char* record) {
  const int64_t padded = round_up(k, kTile);
  TaskScratch scratch(TaskScratch::bytes_for(static_cast<size_t>(padded), 4));
  auto* values = scratch.take<float>(padded);
  if (!kernels_.load_row(row, kind, perm, factor, values, k, padded)) inside_ = false;
  kernels_.encode(values, k, form, record);
}

// The records of pairs that differ between the experts of a token.
void BlockTurn::load_pairs(const PackedMatrix& w, const Inputs& in, bool worth) {
  run_tasks(static_cast<int64_t>(bands_.size()), worth, [&](int64_t i) {
    const Band& b = bands_[static_cast<size_t>(i)];
    for (int64_t at = b.begin; at < b.begin + b.count; ++at) {
      const int64_t pair = routing_.order[static_cast<size_t>(at)];
      encode(row_of_x(pair / c.slots), c.kind, w.expert_perm(b.expert),
             c.weight_on_input ? weight(pair) : 1.0f, c.hidden, in.form,
             in.records + at * in.form.stride);
    }
  });
}

// Rows of x as `w` wants them.
Inputs BlockTurn::load(Scratch& s, const PackedMatrix& w) {
  const bool differ = c.weight_on_input || w.perm;
  Inputs in{records_for(w.first, operand_), nullptr, by_expert_ && !differ};
  const int64_t stride = in.form.stride;
  in.records = s.take<char>(((in.of_tokens ? tokens_ : pairs_) + kSlackRows) * stride);
  const bool worth = tokens_ * c.hidden > kWorthEncoding;
  if (differ) {
    load_pairs(w, in, worth);
    return in;
  }
  run_tasks(tokens_, worth, [&](int64_t token) {
    const auto become = [&](char* record) {
      encode(row_of_x(token), c.kind, nullptr, 1.0f, c.hidden, in.form, record);
    };
    if (in.of_tokens) return become(in.records + token * stride);
    const char* record = nullptr;
    for (int64_t pair = token * c.slots; pair < (token + 1) * c.slots; ++pair) {
      const int64_t at = routing_.position[static_cast<size_t>(pair)];
      if (at < 0) continue;
      char* to = in.records + at * stride;
      if (record) std::memcpy(to, record, static_cast<size_t>(stride));
      else become(to);
      record = to;
    }
  });
  return in;
}

// The rows of a band; those of tokens are copied, so that they lie near the core that reads them.
BlockRows BlockTurn::own_rows(const Inputs& in, const Band& b, TaskScratch& s) const {
  if (!in.of_tokens) return in.rows(b);
  const int64_t stride = in.form.stride;
  auto* rows = s.take<char>((b.count + kSlackRows) * stride);
  for (int64_t r = 0; r < b.count; ++r) {
    const int64_t pair = routing_.order[static_cast<size_t>(b.begin + r)];
    std::memcpy(rows + r * stride, in.records + pair / c.slots * stride,
                static_cast<size_t>(stride));
  }
  return {rows, b.count};
}

// h: the band's first row.
void BlockTurn::gate_up(const Band& b, int64_t tile, int64_t tiles, const Inputs& gate,
                        const BlockRows& gate_rows, const Inputs& up, const BlockRows& up_rows,
                        float* work, float* h) {
  const Matrix up_w = c.up.expert(b.expert);
  const Matrix gate_w = c.has_gate ? c.gate.expert(b.expert) : up_w;
  kernels_.gate_up(c.has_gate ? &gate_w : nullptr, gate.form, up_w, up.form, tile, tiles,
                   gate_rows, up_rows, c.act, work, h, h_step_);
}

void BlockTurn::encode_hidden(int64_t at, int64_t expert, const float* h, const Inputs& down) {
  char* record = down.records + at * down.form.stride;
  if (!c.down.perm) return kernels_.encode(h, c.intermediate, down.form, record);
  encode(h, kFloat32, c.down.expert_perm(expert), 1.0f, c.intermediate, down.form, record);
}

void BlockTurn::by_expert(const Inputs& gate, const Inputs& up, const Inputs& down) {
  const int64_t tiles = div_up(c.intermediate, kTile);
  run_tasks(static_cast<int64_t>(bands_.size()), worth_, [&](int64_t i) {
    const Band& b = bands_[static_cast<size_t>(i)];
    // encode() takes from the same use, so the band's rows are its own.
    const auto h = std::make_unique_for_overwrite<float[]>(static_cast<size_t>(b.count * h_step_));
    {
      const int64_t copied = (b.count + kSlackRows) * (gate.form.stride + up.form.stride);
      TaskScratch own(TaskScratch::bytes_for(2 * kBandFloats, 4) +
                      TaskScratch::bytes_for(static_cast<size_t>(copied), 1));
      auto* work = own.take<float>(2 * kBandFloats);
      const BlockRows up_rows = own_rows(up, b, own);
      const BlockRows gate_rows =
          gate.records == up.records ? up_rows : own_rows(gate, b, own);
      for (int64_t tile = 0; tile < tiles; tile += kTilesPerCall)
        gate_up(b, tile, std::min(kTilesPerCall, tiles - tile), gate, gate_rows, up, up_rows, work,
                h.get());
      kernels_.leave();
    }
    for (int64_t r = 0; r < b.count; ++r)
      encode_hidden(b.begin + r, b.expert, h.get() + r * h_step_, down);
  });
}

void BlockTurn::by_column(const Inputs& gate, const Inputs& up, const Inputs& down) {
  const int64_t tiles = div_up(c.intermediate, kTile);
  const auto bands = static_cast<int64_t>(bands_.size());
  int64_t step = kTilesPerCall;
  while (step > 1 && bands * div_up(tiles, step) < 4 * threads_) step /= 2;
  const int64_t run = run_length(bands * div_up(tiles, step), threads_) * step;
  const int64_t columns = div_up(tiles, run);
  std::vector<float> h(static_cast<size_t>(pairs_ * h_step_));
  run_tasks(bands * columns, worth_, [&](int64_t i) {
    const Band& b = bands_[static_cast<size_t>(i / columns)];
    const int64_t first = i % columns * run, last = std::min(first + run, tiles);
    TaskScratch own(TaskScratch::bytes_for(2 * kBandFloats, 4));
    auto* work = own.take<float>(2 * kBandFloats);
    for (int64_t tile = first; tile < last; tile += step)
      gate_up(b, tile, std::min(step, last - tile), gate, gate.rows(b), up, up.rows(b), work,
              h.data() + b.begin * h_step_);
    kernels_.leave();
  });
  run_tasks(bands, pairs_ * h_step_ > kWorthEncoding, [&](int64_t i) {
    const Band& b = bands_[static_cast<size_t>(i)];
    for (int64_t at = b.begin; at < b.begin + b.count; ++at)
      encode_hidden(at, b.expert, h.data() + at * h_step_, down);
  });
}

void BlockTurn::down(const Inputs& in, char* out) {
  const int64_t tiles = div_up(c.hidden, kTile);
  int64_t step = kTilesPerCall;
  while (step > 1 && div_up(tiles, step) < 4 * threads_) step /= 2;
  const int64_t results = c.reduce ? tokens_ : tokens_ * c.slots;
  std::vector<int32_t> to(static_cast<size_t>(pairs_));
  std::vector<float> weights(static_cast<size_t>(pairs_));
  for (int64_t at = 0; at < pairs_; ++at) {
    const int64_t pair = routing_.order[static_cast<size_t>(at)];
    to[static_cast<size_t>(at)] = static_cast<int32_t>(c.reduce ? pair / c.slots : pair);
    weights[static_cast<size_t>(at)] = c.weight_on_input ? 1.0f : weight(pair);
  }
  // With few results, longer runs of an expert's memory follow each other.
  int64_t run = step;
  while (run < 4 * step && div_up(tiles, 2 * run) >= 8 * threads_ &&
         results * run * kTile < kSumFloats / 2)
    run *= 2;
  const int64_t width = run * kTile;
  char* base = out + (c.reduce ? first_ : first_ * c.slots) * c.hidden * c.out_size;
  run_tasks(div_up(tiles, run), worth_, [&](int64_t task) {
    const int64_t tile = task * run, last = std::min(tile + run, tiles);
    TaskScratch own(TaskScratch::bytes_for(kBandFloats, 4) +
                    TaskScratch::bytes_for(static_cast<size_t>(results * width), 4));
    auto* work = own.take<float>(kBandFloats);
    auto* sums = own.take<float>(results * width);
    std::memset(sums, 0, static_cast<size_t>(results * width) * 4);
    for (const Band& b : bands_) {
      const Matrix w = c.down.expert(b.expert);
      for (int64_t at = tile; at < last; at += step)
        kernels_.add(w, in.form, at, std::min(step, last - at), in.rows(b), to.data() + b.begin,
                     weights.data() + b.begin, work, sums + (at - tile) * kTile, width);
    }
    kernels_.leave();
    const float one = 1.0f;
    const int64_t columns = std::min(width, c.hidden - tile * kTile);
    for (int64_t r = 0; r < results; ++r) {
      const float* row = sums + r * width;
      kernels_.combine(&row, &one, 1, c.scaling,
                       base + (r * c.hidden + tile * kTile) * c.out_size, c.out_kind, 0, columns);
    }
  });
}

bool BlockTurn::run(char* out) {
  const int64_t slack = kSlackRows * bytes_per_token(c, operand_) + 4096;
  Scratch scratch(static_cast<size_t>(bytes_per_token(c, operand_) * tokens_ + slack));
  const Inputs up = load(scratch, c.up);
  Inputs gate = up;
  const bool shared = !c.has_gate || (!c.gate.perm && !c.up.perm &&
                                      same_records(records_for(c.gate.first, operand_), up.form));
  if (!shared) gate = load(scratch, c.gate);
  if (!inside_) return false;
  Inputs hidden{records_for(c.down.first, operand_)};
  hidden.records = scratch.take<char>((pairs_ + kSlackRows) * hidden.form.stride);
  if (by_expert_) by_expert(gate, up, hidden);
  else by_column(gate, up, hidden);
  if (!inside_) return false;
  down(hidden, out);
  return true;
}

}  // namespace

void block_moe(const MoeCall& c, const BlockLevel& level, char* out) {
  if (c.has_gate) check_operand(c.gate.first, level.operand, "gate_");
  check_operand(c.up.first, level.operand, "up_");
  check_operand(c.down.first, level.operand, "down_");
  const int64_t turn =
      std::max<int64_t>(1, kRecordBytes / BlockTurn::bytes_per_token(c, level.operand));
  for (int64_t first = 0; first < c.tokens; first += turn)
    if (!BlockTurn(c, level, first, std::min(turn, c.tokens - first)).run(out))
      fail("a perm of an expert has an index outside its k");
}

}  // namespace hal_cpu
