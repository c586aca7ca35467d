// Attention over packed pages: which rows, heads and stretches of tokens make a task, and how
// their results join.
//
// A unit is a few query rows of one sequence and one or more kv heads. Its tokens are cut at multiples
// of kKvSplit from the sequence's start, and each head's parts are merged in that order, whether one
// thread takes them in turn or several at once: the numbers depend on nothing but the row and its
// cache. A thread with several heads takes all of them over one stretch before it goes on to the next,
// since their pages are the same.
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "error.h"
#include "kv_config.h"
#include "kv_ops.h"
#include "parallel.h"

namespace hal_cpu {
namespace {

constexpr int64_t kUnitQueries = 64;  // at most, unless one row's heads are more

struct Attention {
  const KvConfig* c;
  const KvKernels* kernels;
  int64_t heads, per_kv, sequences, max_pages;
  FloatKind kind;  // of q and out
  const char* q;
  const uint8_t* pages;
  const int32_t *table, *lengths, *starts;
  const uint8_t* tails;
  const int32_t* tail_ids;
  const float* sinks;
  double soft_cap;  // 0 for none
  float scale;
  bool causal;
  int64_t window, sink_tokens;
  char* out;
  float* lse;

  int64_t float_bytes() const { return kind == kFloat32 ? 4 : 2; }
  int64_t dim() const { return c->keys.side.dim; }
  int64_t value_dim() const { return c->values.side.dim; }
};

struct Unit {
  int64_t sequence, first, rows;  // rows `first` on of q
  int64_t head, heads;            // heads `head` on
  int64_t splits;
};

// The queries of a unit and their sums, in one piece of memory.
class Queries {
 public:
  Queries(const Attention& a, int64_t count, void* memory) {
    char* p = static_cast<char*>(memory);
    const auto take = [&](int64_t items, int64_t size) {
      char* at = p;
      p += round_up(items * size, 64);
      return at;
    };
    q = reinterpret_cast<float*>(take(count * a.dim(), 4));
    q16 = reinterpret_cast<int32_t*>(take(count * a.dim() / 2, 4));
    step = reinterpret_cast<float*>(take(count, 4));
    sum = reinterpret_cast<float*>(take(count, 4));
    low = reinterpret_cast<int64_t*>(take(count, 8));
    high = reinterpret_cast<int64_t*>(take(count, 8));
    plain = reinterpret_cast<float*>(take(count * a.dim(), 4));
    wide = reinterpret_cast<bool*>(take(count, 1));
  }
  static int64_t bytes(const Attention& a, int64_t count) {
    return count * (a.dim() * 10 + 25) + 8 * 64;
  }

  float *q, *step, *sum, *plain;
  int32_t* q16;
  int64_t *low, *high;
  bool* wide;
};

// Running sums of a unit or of one of its splits.
struct Sums {
  float *max, *sum, *acc;

  Sums(float* memory, int64_t count) : max(memory), sum(memory + round_up(count, 16)), acc(sum + round_up(count, 16)) {}
  static int64_t floats(const Attention& a, int64_t count) { return 2 * round_up(count, 16) + count * a.value_dim(); }
};

void load_queries(const Attention& a, const Unit& u, Queries& x) {
  const KvSideConfig& keys = a.c->keys;
  const int64_t d = a.dim(), length = a.lengths[u.sequence], count = u.rows * a.per_kv;
  const int64_t queries = a.starts[u.sequence + 1] - a.starts[u.sequence];
  // fp8 is read as 2^-8 times its value.
  const float scale = a.scale * keys.head_scale(u.head) * (keys.side.kind == kKvFp8 ? 256.0f : 1.0f);
  float* to = keys.to_rotated ? x.plain : x.q;
  for (int64_t r = 0; r < u.rows; ++r) {
    const int64_t row = u.first + r, position = length - queries + row - a.starts[u.sequence];
    const char* from = a.q + (row * a.heads + u.head * a.per_kv) * d * a.float_bytes();
    a.kernels->load(from, a.kind, scale, to + r * a.per_kv * d, a.per_kv * d);
    for (int64_t i = r * a.per_kv; i < (r + 1) * a.per_kv; ++i) {
      x.low[i] = a.window && position - a.window + 1 > 0 ? position - a.window + 1 : 0;
      x.high[i] = a.causal ? position + 1 : length;
    }
  }
  if (keys.to_rotated) a.kernels->rotate(x.plain, keys.to_rotated, x.q, count, d);
  for (int64_t i = 0; i < count; ++i)
    a.kernels->round_query(keys.side, x.q + i * d, x.q16 + i * d / 2, x.step + i, x.sum + i, x.wide + i);
}

struct Next {
  int64_t head, begin;
};

void run_split(const Attention& a, const Unit& u, const Queries& x, int64_t index, Next next,
               const Sums& to, void* work) {
  const KvConfig& c = *a.c;
  const int64_t length = a.lengths[u.sequence];
  KvSequence s{a.pages, c.page_bytes, c.page_size, u.head, a.table + u.sequence * a.max_pages, nullptr, length,
               length, next.head, next.begin < length ? next.begin : -1};
  if (c.tail_bytes && length % kKvGroup) {
    s.tail = a.tails + a.tail_ids[u.sequence] * c.tail_bytes + u.head * 2 * c.tail.tile_bytes;
    s.tail_begin = length - length % kKvGroup;
  }
  const KvQueries q{u.rows * a.per_kv, x.q, x.q16, x.step, x.sum, x.wide, x.low, x.high,
                    a.sink_tokens, static_cast<float>(a.soft_cap), to.max, to.sum, to.acc};
  const int64_t begin = index * kKvSplit, end = begin + kKvSplit < length ? begin + kKvSplit : length;
  a.kernels->split(s, c.keys.side, c.values.side, c.tail, q, begin, end, work);
}

void clear(const Attention& a, const Sums& s, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    s.max[i] = -INFINITY;
    s.sum[i] = 0.0f;
  }
  std::fill(s.acc, s.acc + count * a.value_dim(), 0.0f);
}

void merge(const Attention& a, const Sums& into, const Sums& from, int64_t count) {
  const int64_t d = a.value_dim();
  for (int64_t i = 0; i < count; ++i)
    a.kernels->merge(into.max + i, into.sum + i, into.acc + i * d, from.max[i], from.sum[i], from.acc + i * d, d);
}

// Whether any row of the unit sees a token of the split.
bool split_seen(const Attention& a, const Unit& u, const Queries& x, int64_t index) {
  const int64_t begin = index * kKvSplit, end = begin + kKvSplit, last = u.rows * a.per_kv - 1;
  return begin < x.high[last] && (end > x.low[0] || begin < a.sink_tokens);
}

void finish(const Attention& a, const Unit& u, const Sums& s, float* buffer) {
  const KvSideConfig& values = a.c->values;
  const int64_t d = a.value_dim(), count = u.rows * a.per_kv;
  const float stored = values.head_scale(u.head) * (values.side.kind == kKvFp8 ? 256.0f : 1.0f);
  const float* acc = s.acc;
  if (values.from_rotated) {
    a.kernels->rotate(s.acc, values.from_rotated, buffer, count, d);
    acc = buffer;
  }
  for (int64_t i = 0; i < count; ++i) {
    const int64_t head = u.head * a.per_kv + i % a.per_kv, at = (u.first + i / a.per_kv) * a.heads + head;
    float sum = s.sum[i], max = s.max[i];
    if (max <= std::numeric_limits<float>::lowest()) {  // nothing seen, or infinite keys alone
      sum = 0.0f;
      max = -INFINITY;
    }
    float factor = sum == 0.0f ? 0.0f : stored / sum;
    if (a.sinks) {
      const float sink = a.sinks[head], after = max < sink ? sink : max;
      const float mine = max == -INFINITY ? 0.0f : std::exp(max - after);
      sum = sum * mine + std::exp(sink - after);
      factor = stored * mine / sum;
      max = after;
    }
    a.kernels->store(acc + i * d, factor, a.out + at * d * a.float_bytes(), a.kind, d);
    a.lse[at] = max + std::log(sum);
  }
}

Unit one_head(const Unit& u, int64_t i) { return {u.sequence, u.first, u.rows, u.head + i, 1, u.splits}; }

// A whole unit on one thread.
void run_unit(const Attention& a, const Unit& u) {
  const int64_t count = u.rows * a.per_kv, floats = Sums::floats(a, count), bytes = Queries::bytes(a, count);
  const int64_t work = a.kernels->work_bytes(a.c->keys.side, a.c->values.side);
  Scratch scratch(static_cast<size_t>(u.heads * round_up(bytes, 64) + (u.heads + 1) * round_up(floats * 4, 64) + round_up(work, 64)));
  const Sums part(scratch.take<float>(floats), count);
  void* memory = scratch.take<char>(work);
  std::vector<Queries> queries;
  std::vector<Sums> totals;
  for (int64_t h = 0; h < u.heads; ++h) {
    queries.emplace_back(a, count, scratch.take<char>(bytes));
    totals.emplace_back(scratch.take<float>(floats), count);
    load_queries(a, one_head(u, h), queries.back());
    clear(a, totals.back(), count);
  }
  for (int64_t i = 0; i < u.splits; ++i) {
    // What a row sees is the same for all heads.
    if (!split_seen(a, u, queries[0], i)) continue;
    for (int64_t h = 0; h < u.heads; ++h) {
      const Next next = h + 1 < u.heads ? Next{u.head + h + 1, i * kKvSplit} : Next{u.head, (i + 1) * kKvSplit};
      run_split(a, one_head(u, h), queries[static_cast<size_t>(h)], i, next, part, memory);
      merge(a, totals[static_cast<size_t>(h)], part, count);
    }
  }
  for (int64_t h = 0; h < u.heads; ++h) finish(a, one_head(u, h), totals[static_cast<size_t>(h)], part.acc);
}

struct Free {
  void operator()(void* p) const { std::free(p); }
};
using Memory = std::unique_ptr<char, Free>;

Memory allocate(int64_t bytes) {
  Memory m(static_cast<char*>(std::aligned_alloc(64, static_cast<size_t>(round_up(bytes, 64)))));
  if (!m) throw std::bad_alloc();
  return m;
}

// Few units, of one head each: their splits are tasks of their own.
void run_by_split(const Attention& a, const std::vector<Unit>& units) {
  struct Part {
    int64_t unit, index;
  };
  std::vector<Part> parts;
  std::vector<int64_t> q_at, sums_at;
  int64_t q_bytes = 0, sums = 0;
  for (size_t i = 0; i < units.size(); ++i) {
    const int64_t count = units[i].rows * a.per_kv;
    q_at.push_back(q_bytes);
    q_bytes += round_up(Queries::bytes(a, count), 64);
    for (int64_t s = 0; s < units[i].splits; ++s) {
      parts.push_back({static_cast<int64_t>(i), s});
      sums_at.push_back(sums);
      sums += round_up(Sums::floats(a, count), 16);
    }
  }
  const Memory queries = allocate(q_bytes + 64), results = allocate(sums * 4 + 64);
  auto* result = reinterpret_cast<float*>(results.get());
  const auto unit_queries = [&](int64_t i) {
    return Queries(a, units[static_cast<size_t>(i)].rows * a.per_kv, queries.get() + q_at[static_cast<size_t>(i)]);
  };
  const auto unit_count = static_cast<int64_t>(units.size());
  run_tasks(unit_count, true, [&](int64_t i) {
    Queries x = unit_queries(i);
    load_queries(a, units[static_cast<size_t>(i)], x);
  });
  const int64_t work = a.kernels->work_bytes(a.c->keys.side, a.c->values.side);
  run_tasks(static_cast<int64_t>(parts.size()), true, [&](int64_t p) {
    const Part& part = parts[static_cast<size_t>(p)];
    const Unit& u = units[static_cast<size_t>(part.unit)];
    const Queries x = unit_queries(part.unit);
    const Sums to(result + sums_at[static_cast<size_t>(p)], u.rows * a.per_kv);
    if (!split_seen(a, u, x, part.index)) return clear(a, to, u.rows * a.per_kv);
    Scratch scratch(static_cast<size_t>(round_up(work, 64)));
    run_split(a, u, x, part.index, {0, -1}, to, scratch.take<char>(work));
  });
  std::vector<int64_t> first(units.size() + 1, 0);
  for (size_t i = 0; i < units.size(); ++i) first[i + 1] = first[i] + units[i].splits;
  run_tasks(unit_count, true, [&](int64_t i) {
    const Unit& u = units[static_cast<size_t>(i)];
    const int64_t count = u.rows * a.per_kv, floats = Sums::floats(a, count);
    Scratch scratch(static_cast<size_t>(2 * round_up(floats * 4, 64)));
    const Sums total(scratch.take<float>(floats), count);
    float* buffer = scratch.take<float>(floats);
    clear(a, total, count);
    for (int64_t s = first[static_cast<size_t>(i)]; s < first[static_cast<size_t>(i) + 1]; ++s)
      merge(a, total, Sums(result + sums_at[static_cast<size_t>(s)], count), count);
    finish(a, u, total, buffer);
  });
}

std::vector<Unit> units_of(const Attention& a, int64_t heads) {
  std::vector<Unit> units;
  const int64_t step = kUnitQueries / a.per_kv > 1 ? kUnitQueries / a.per_kv : 1;
  for (int64_t b = 0; b < a.sequences; ++b)
    for (int64_t row = a.starts[b]; row < a.starts[b + 1]; row += step)
      for (int64_t h = 0; h < a.c->heads; h += heads)
        units.push_back({b, row, std::min(step, a.starts[b + 1] - row), h, heads, div_up(a.lengths[b], kKvSplit)});
  return units;
}

void run(const Attention& a) {
  const int64_t threads = torch::stable::get_num_threads();
  std::vector<Unit> units = units_of(a, 1);
  auto count = static_cast<int64_t>(units.size());
  int64_t work = 0, splits = 0, queries = 0;
  for (const Unit& u : units) {
    splits += u.splits;
    work += a.lengths[u.sequence] * u.rows * a.per_kv * (a.dim() + a.value_dim());
    queries = std::max(queries, u.rows * a.per_kv);
  }
  if (work > kWorthThreads && count < 4 * threads && splits > count && threads > 1) return run_by_split(a, units);
  // As many heads a unit as leave each thread a few, and as their sums leave in its cache.
  int64_t heads = 1;
  while (a.c->heads % (2 * heads) == 0 && count >= 8 * heads * threads && 2 * heads * queries <= kUnitQueries) heads *= 2;
  if (heads > 1) units = units_of(a, heads);
  count = static_cast<int64_t>(units.size());
  run_tasks(count, work > kWorthThreads, [&](int64_t i) { run_unit(a, units[static_cast<size_t>(i)]); });
}

const int32_t* check_ints(const Tensor& t, const char* name, std::initializer_list<int64_t> shape) {
  check_plain(t, name);
  check_type(t, name, ScalarType::Int);
  check_shape(t, name, shape);
  return static_cast<const int32_t*>(t.data_ptr());
}

void check_sequences(const Attention& a, int64_t rows, int64_t pages) {
  if (a.starts[0] != 0 || a.starts[a.sequences] != rows)
    fail("query_starts runs from ", a.starts[0], " to ", a.starts[a.sequences], "; expected 0 to ", rows, ", the rows of q");
  for (int64_t b = 0; b < a.sequences; ++b) {
    const int64_t length = a.lengths[b], queries = int64_t{a.starts[b + 1]} - a.starts[b];
    if (queries < 0) fail("query_starts[", b + 1, "] is ", a.starts[b + 1], ", below ", a.starts[b], " before it");
    if (length < 0 || length > a.max_pages * a.c->page_size)
      fail("lengths[", b, "] is ", length, "; its ", a.max_pages, " pages hold 0 to ", a.max_pages * a.c->page_size);
    if (queries > length && length > 0)
      fail("sequence ", b, " has ", queries, " query rows and ", length, " cached tokens, theirs among them");
    for (int64_t i = 0; i < div_up(length, a.c->page_size); ++i) {
      const int32_t page = a.table[b * a.max_pages + i];
      if (page < 0 || page >= pages) fail("block_table[", b, ", ", i, "] is ", page, "; expected 0 to ", pages - 1);
    }
  }
}

struct AttendTensors {
  Tensor q, pages, table, lengths, starts;
  std::optional<Tensor> tails, tail_ids, sinks;
  Tensor out, lse;
};

void attend(const AttendTensors& t, const KvArguments& arguments, Attention a, const std::string& isa) {
  a.kernels = &kv_kernels_for(isa);
  a.kind = check_float(t.q, "q");
  const KvConfig c(arguments, a.kind);
  a.c = &c;
  check_plain(t.q, "q");
  if (t.q.dim() != 3 || t.q.size(2) != a.dim() || t.q.size(1) % c.heads || t.q.size(1) == 0)
    fail("q has shape ", shape_text(t.q), "; expected [rows, a multiple of ", c.heads, ", ", a.dim(), "]");
  const int64_t rows = t.q.size(0);
  a.heads = t.q.size(1);
  a.per_kv = a.heads / c.heads;
  check_pages(t.pages, c);
  if (t.table.dim() != 2) fail("block_table has shape ", shape_text(t.table), "; expected [sequences, pages]");
  a.sequences = t.table.size(0);
  a.max_pages = t.table.size(1);
  a.table = check_ints(t.table, "block_table", {a.sequences, a.max_pages});
  a.lengths = check_ints(t.lengths, "lengths", {a.sequences});
  a.starts = check_ints(t.starts, "query_starts", {a.sequences + 1});
  check_tails(t.tails, t.tail_ids, a.sequences, "sequence", c);
  check_sequences(a, rows, t.pages.size(0));
  check_plain(t.out, "out");
  check_type(t.out, "out", t.q.scalar_type());
  check_shape(t.out, "out", {rows, a.heads, a.value_dim()});
  check_plain(t.lse, "lse");
  check_type(t.lse, "lse", ScalarType::Float);
  check_shape(t.lse, "lse", {rows, a.heads});
  if (t.sinks) {
    check_plain(*t.sinks, "sinks");
    check_type(*t.sinks, "sinks", ScalarType::Float);
    check_shape(*t.sinks, "sinks", {a.heads});
    a.sinks = static_cast<const float*>(t.sinks->data_ptr());
  }
  check_range(a.window, "window", 0, kMaxDim);
  check_range(a.sink_tokens, "sink_tokens", 0, kMaxDim);
  // The kernels cap in float32, where a smaller one would be 0, which means none.
  if (a.soft_cap != 0.0 && !(a.soft_cap > 0.0 && std::isnormal(static_cast<float>(a.soft_cap))))
    fail("soft_cap is ", a.soft_cap, "; expected 0 for none, or a normal float32 from 1.2e-38 to 3.4e38");
  if (!std::isfinite(a.scale)) fail("scale is ", a.scale);
  a.q = static_cast<const char*>(t.q.data_ptr());
  a.pages = static_cast<const uint8_t*>(t.pages.data_ptr());
  if (c.tail_bytes) {
    a.tails = static_cast<const uint8_t*>(t.tails->data_ptr());
    a.tail_ids = static_cast<const int32_t*>(t.tail_ids->data_ptr());
  }
  a.out = static_cast<char*>(t.out.data_ptr());
  a.lse = static_cast<float*>(t.lse.data_ptr());
  run(a);
}

}  // namespace

void kv_attend_op(StableIValue* stack, uint64_t inputs, uint64_t) {
  Args args(stack, inputs);
  const Tensor q = args.tensor(), pages = args.tensor(), table = args.tensor();
  const Tensor lengths = args.tensor(), starts = args.tensor();
  const auto tails = args.maybe_tensor(), tail_ids = args.maybe_tensor(), sinks = args.maybe_tensor();
  const KvArguments cache = read_kv_arguments(args);
  Attention a{};
  a.scale = static_cast<float>(args.real());
  a.causal = args.boolean();
  a.window = args.integer();
  a.sink_tokens = args.integer();
  a.soft_cap = args.real();
  const std::string isa = args.text();
  const Tensor out = args.tensor(), lse = args.tensor();
  attend({q, pages, table, lengths, starts, tails, tail_ids, sinks, out, lse}, cache, a, isa);
}

}  // namespace hal_cpu
