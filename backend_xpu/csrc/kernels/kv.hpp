// Attention over pages of quantized keys and values, dequantized in the loop, and the quantization of new tokens.
// A page holds the parts of keys, then those of values, each a block of rows [page_size, heads, width]; grouped parts have a row for 32
// tokens. Sums are in float32.
#pragma once
#include "narrow_floats.hpp"

namespace hal {

/// How vectors are stored, as Python numbers it.
enum Stored : int { STORED_FP32 = 0, STORED_BF16 = 1, STORED_FP16 = 2, STORED_FP8 = 3, STORED_INT8 = 4, STORED_CODES = 5 };
constexpr int KV_GROUP = 32, KV_MOST = 256, KV_EACH = KV_MOST / HAL_SG;
/// Sub-groups that share the tokens of one query head.
constexpr int KV_SHARES = 8;

/// One side of a cache. codes, scale: first byte of the part in a page. width: bytes of a vector's codes. grouped: a scale for each
/// channel of 32 tokens. statics: float32 [heads] of fp8. book: levels of codes of `bits` bits.
struct Side {
  const float *statics, *book;
  int stored, dim, bits, codes, width, scale, grouped;
};

inline int code_at(const unsigned char *packed, int channel, int bits) {
  const int first = channel * bits, byte = first >> 3, shift = first & 7;
  int word = packed[byte];
  if (shift + bits > 8) word |= packed[byte + 1] << 8;
  return word >> shift & ((1 << bits) - 1);
}

/// Channels lane, lane + SG .. of a stored vector, without the scale that all of them share, which is returned.
inline float load_vector(const Side &side, const unsigned char *page, int row, int heads, int head, int lane, float *x) {
  const unsigned char *codes = page + side.codes + (static_cast<size_t>(row) * heads + head) * side.width;
  const auto *scales = reinterpret_cast<const half *>(page + side.scale);
  float shared = 1.0f;
  if (side.stored == STORED_FP8) shared = side.statics[head];
  else if (side.stored >= STORED_INT8 && !side.grouped) shared = widened(scales[static_cast<size_t>(row) * heads + head]);
  const half *own = scales + (static_cast<size_t>(row / KV_GROUP) * heads + head) * side.dim;
  for (int i = 0, channel = lane; channel < side.dim; ++i, channel += HAL_SG) {
    if (side.stored <= STORED_FP16) x[i] = load_float(codes, side.stored, channel);
    else if (side.stored == STORED_FP8) x[i] = from_e4m3(codes[channel]);
    else if (side.stored == STORED_INT8) {
      const float code = static_cast<float>(static_cast<signed char>(codes[channel]));
      x[i] = side.grouped ? code * widened(own[channel]) : code;
    } else x[i] = side.book[code_at(codes, channel, side.bits)];
  }
  return shared;
}

/// Which tokens a query sees; window 0 for all.
struct Sight {
  int causal, window, sink_tokens;
  bool sees(int own, int at) const { return (!causal || at <= own) && (!window || at > own - window || at < sink_tokens); }
};

/// The running softmax of one sub-group, over channels lane, lane + SG ..
struct Running {
  float most = -INF, sum = 0.0f, out[KV_EACH] = {};
  void add(float logit, const float *v, float scale, int count) {
    const float top = logit > most ? logit : most;
    const bool none = top == -INF && logit == logit; // a NaN has to stay
    const float kept = top == -INF ? 1.0f : sycl::exp(most - top), weight = none ? 0.0f : sycl::exp(logit - top);
    sum = sum * kept + weight;
    for (int i = 0; i < count; ++i) out[i] = out[i] * kept + weight * (v[i] * scale);
    most = top;
  }
};

} // namespace hal

/// One work-group of KV_SHARES sub-groups for a query row and head; q float32 [T, heads_q, dim], out float32 [T, heads_q, v_dim].
HAL_KERNEL void kv_attend(const float *q, const unsigned char *pages, const int *table, int table_width, const int *lengths, const int *starts,
                          int sequences, int heads_q, int heads, int page_size, int page_bytes, const unsigned char *tails, int tail_kind,
                          const int *tail_ids, const float *k_statics, const float *k_book, int k_stored, int k_dim, int k_bits,
                          int k_codes, int k_width, int k_scale, int k_grouped, const float *v_statics, const float *v_book, int v_stored,
                          int v_dim, int v_bits, int v_codes, int v_width, int v_scale, float scale, float soft_cap, int causal, int window,
                          int sink_tokens, const float *sinks, float *out, float *lse) {
  using namespace hal;
  sycl::ext::oneapi::experimental::work_group_static<float[KV_SHARES * (KV_MOST + 2)]> shared;
  const auto item = this_item();
  const auto group = item.get_sub_group();
  const int lane = static_cast<int>(group.get_local_linear_id()), share = static_cast<int>(group.get_group_linear_id());
  const int row = static_cast<int>(item.get_group(1)), head_q = static_cast<int>(item.get_group(2));
  const Side keys{k_statics, k_book, k_stored, k_dim, k_bits, k_codes, k_width, k_scale, k_grouped};
  const Side values{v_statics, v_book, v_stored, v_dim, v_bits, v_codes, v_width, v_scale, 0};
  const Sight sight{causal, window, sink_tokens};
  int sequence = 0;
  while (sequence + 1 < sequences && starts[sequence + 1] <= row) ++sequence;
  const int length = lengths[sequence], head = head_q / (heads_q / heads);
  const int own = length - (starts[sequence + 1] - row);
  const int closed = keys.grouped ? length - length % KV_GROUP : length;
  float query[KV_EACH], x[KV_EACH];
  for (int i = 0, channel = lane; channel < k_dim; ++i, channel += HAL_SG)
    query[i] = q[(static_cast<size_t>(row) * heads_q + head_q) * k_dim + channel];
  const int k_count = (k_dim - lane + HAL_SG - 1) / HAL_SG, v_count = (v_dim - lane + HAL_SG - 1) / HAL_SG;
  Running running;
  for (int at = share; at < length; at += KV_SHARES) {
    if (!sight.sees(own, at)) continue;
    const unsigned char *page = pages + static_cast<size_t>(table[static_cast<size_t>(sequence) * table_width + at / page_size]) * page_bytes;
    const int in_page = at % page_size;
    float k_scaled = 1.0f;
    if (at < closed) k_scaled = load_vector(keys, page, in_page, heads, head, lane, x);
    else {
      const size_t first = ((static_cast<size_t>(tail_ids[sequence]) * KV_GROUP + at % KV_GROUP) * heads + head) * k_dim;
      for (int i = 0, channel = lane; channel < k_dim; ++i, channel += HAL_SG) x[i] = load_float(tails, tail_kind, first + channel);
    }
    float dot = 0.0f;
    for (int i = 0; i < k_count; ++i) dot += query[i] * x[i];
    dot = sycl::reduce_over_group(group, dot, sycl::plus<float>()) * k_scaled * scale;
    if (soft_cap > 0.0f) dot = soft_cap * sycl::tanh(dot / soft_cap);
    const float v_scaled = load_vector(values, page, in_page, heads, head, lane, x);
    running.add(dot, x, v_scaled, v_count);
  }
  float *mine = &shared[0] + share * (KV_MOST + 2);
  if (lane == 0) mine[KV_MOST] = running.most, mine[KV_MOST + 1] = running.sum;
  for (int i = 0; i < v_count; ++i) mine[lane + i * HAL_SG] = running.out[i];
  sycl::group_barrier(item.get_group());
  const float sink = sinks ? sinks[head_q] : -INF;
  float most = sink, sum = 0.0f;
  for (int i = 0; i < KV_SHARES; ++i) {
    const float other = (&shared[0])[i * (KV_MOST + 2) + KV_MOST];
    most = other > most ? other : most;
  }
  float factors[KV_SHARES];
  for (int i = 0; i < KV_SHARES; ++i) {
    const float *its = &shared[0] + i * (KV_MOST + 2) + KV_MOST;
    factors[i] = its[0] == -INF && its[1] == 0.0f ? 0.0f : sycl::exp(its[0] - most);
    sum += its[1] * factors[i];
  }
  if (sinks && most > -INF) sum += sycl::exp(sink - most);
  const size_t to = static_cast<size_t>(row) * heads_q + head_q;
  for (int channel = share * HAL_SG + lane; channel < v_dim; channel += KV_SHARES * HAL_SG) {
    float total = 0.0f;
    for (int i = 0; i < KV_SHARES; ++i) total += (&shared[0])[i * (KV_MOST + 2) + channel] * factors[i];
    out[to * v_dim + channel] = sum == 0.0f ? 0.0f : total / sum;
  }
  if (share == 0 && lane == 0) lse[to] = sum == 0.0f ? most : most + sycl::log(sum);
}

/// Tokens into pages as int8 with a scale of each vector, or as e4m3 with static scales: a sub-group for a token and head.
HAL_KERNEL void kv_store(const void *x, int kind, const int64_t *slots, int heads, int dim, unsigned char *pages, int page_size, int page_bytes,
                         int stored, int codes, int width, int scale, const float *statics) {
  using namespace hal;
  const auto item = this_item();
  const auto group = item.get_sub_group();
  const int lane = static_cast<int>(group.get_local_linear_id());
  const int token = static_cast<int>(item.get_group(1)), head = static_cast<int>(item.get_group(2));
  const int64_t slot = slots[token];
  if (slot < 0) return;
  unsigned char *page = pages + static_cast<size_t>(slot / page_size) * page_bytes;
  const size_t row = static_cast<size_t>(slot % page_size) * heads + head, from = (static_cast<size_t>(token) * heads + head) * dim;
  unsigned char *to = page + codes + row * width;
  float most = 0.0f;
  int finite = 1;
  for (int channel = lane; channel < dim; channel += HAL_SG) {
    const float value = sycl::fabs(load_float(x, kind, from + channel));
    if (!(value < INF)) finite = 0;
    else most = value > most ? value : most;
  }
  most = sycl::reduce_over_group(group, most, sycl::maximum<float>());
  finite = sycl::reduce_over_group(group, finite, sycl::minimum<int>());
  if (stored == STORED_INT8) {
    const float rough = most / 127.0f;
    // the stored scale chooses the codes, and a vector with a NaN reads as NaN
    const half kept = finite ? static_cast<half>(rough < 65504.0f ? rough : 65504.0f) : static_cast<half>(__builtin_nanf(""));
    const float wide = static_cast<float>(kept), inverse = wide == 0.0f ? 0.0f : 1.0f / wide;
    if (lane == 0) reinterpret_cast<half *>(page + scale)[row] = kept;
    for (int channel = lane; channel < dim; channel += HAL_SG) {
      const float value = load_float(x, kind, from + channel) * inverse;
      to[channel] = finite ? static_cast<unsigned char>(static_cast<signed char>(clipped(sycl::rint(value), -127.0f, 127.0f))) : 0;
    }
    return;
  }
  const float own = statics[head], inverse = 1.0f / own;
  for (int channel = lane; channel < dim; channel += HAL_SG) {
    const float value = load_float(x, kind, from + channel);
    to[channel] = sycl::fabs(value) < INF ? to_e4m3(clipped(value * inverse, -448.0f, 448.0f)) : 0x7f;
  }
}
