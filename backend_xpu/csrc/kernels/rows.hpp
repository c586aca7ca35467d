// What happens to rows around the products: slots sorted by expert, rows gathered or quantized, slots summed.
// A slot is one of the top_k places of a token, numbered token * top_k + place. Nothing waits for the host.
#pragma once
#include "common.hpp"

namespace hal {

using sycl::access::address_space;
using Counter = sycl::atomic_ref<int, sycl::memory_order::relaxed, sycl::memory_scope::device, address_space::global_space>;

} // namespace hal

/// Experts of slots, where nothing is sorted: places[slot] = slot, or -1; experts[slot] likewise.
HAL_KERNEL void slot_experts(const void *ids, int wide, const int *map, int64_t *flag, int numel, int experts, int local, int top_k,
                             int *places, int *slot_expert) {
  using namespace hal;
  const int slot = static_cast<int>(this_item().get_global_linear_id());
  if (slot >= numel) return;
  bool wrong = false;
  const int expert = local_expert(ids, wide, map, slot, experts, local, wrong);
  if (wrong) report(flag, ids, wide, slot, top_k);
  places[slot] = expert < 0 ? -1 : slot;
  slot_expert[slot] = expert;
}

/// Slots sorted by expert, by one work-group: offsets [local + 1], order [numel] (slot of a place), places [numel] (place of a slot, or -1).
HAL_KERNEL void sort_slots(const void *ids, int wide, const int *map, int64_t *flag, int numel, int experts, int local, int top_k,
                           int *counts, int *offsets, int *order, int *places) {
  using namespace hal;
  const auto group = this_item().get_group();
  const int lane = static_cast<int>(group.get_local_linear_id()), lanes = static_cast<int>(group.get_local_linear_range());
  for (int e = lane; e < local; e += lanes) counts[e] = 0;
  sycl::group_barrier(group);
  for (int slot = lane; slot < numel; slot += lanes) {
    bool wrong = false;
    const int expert = local_expert(ids, wide, map, slot, experts, local, wrong);
    if (wrong) report(flag, ids, wide, slot, top_k);
    // its place among those of its expert, until the offsets are known
    places[slot] = expert < 0 ? -1 : Counter(counts[expert]).fetch_add(1);
  }
  sycl::group_barrier(group);
  if (lane == 0) {
    int sum = 0;
    for (int e = 0; e < local; ++e) {
      offsets[e] = sum;
      sum += counts[e];
    }
    offsets[local] = sum;
  }
  sycl::group_barrier(group);
  for (int slot = lane; slot < numel; slot += lanes) {
    if (places[slot] < 0) continue;
    bool wrong = false;
    const int place = offsets[local_expert(ids, wide, map, slot, experts, local, wrong)] + places[slot];
    places[slot] = place;
    order[place] = slot;
  }
}

/// Rows of x in the order of the places, in 16 bits: out[place] = x[order[place] / top_k], columns by perm; scales[place] is the slot's weight.
/// order, perm, and weights with scales may be null; total is the number of places, read on the device, or null for `rows` of them.
HAL_KERNEL void gather_rows(const void *x, int kind, int columns, const int *order, int top_k, const int *perm, const float *weights,
                            const int *total, int rows, void *out, int out_kind, float *scales) {
  using namespace hal;
  const auto item = this_item();
  const int place = static_cast<int>(item.get_group(1));
  if (place >= (total ? *total : rows)) return;
  const int slot = order ? order[place] : place;
  const size_t from = static_cast<size_t>(slot / top_k) * columns, to = static_cast<size_t>(place) * columns;
  for (int k = static_cast<int>(item.get_local_id(2)); k < columns; k += static_cast<int>(item.get_local_range(2)))
    store_float(out, out_kind, to + k, load_float(x, kind, from + (perm ? perm[k] : k)));
  // not multiplied: that would round the row once more
  if (weights && item.get_local_id(2) == 0) scales[place] = weights[slot];
}

/// The same, times the slot's weight, to int8 codes and a scale for each row, the largest magnitude over 127.
HAL_KERNEL void quantize_rows(const void *x, int kind, int columns, const int *order, int top_k, const float *weights, const int *total,
                              int rows, signed char *codes, float *scales) {
  using namespace hal;
  const auto item = this_item();
  const int place = static_cast<int>(item.get_group(1));
  if (place >= (total ? *total : rows)) return;
  const int lane = static_cast<int>(item.get_local_id(2)), lanes = static_cast<int>(item.get_local_range(2));
  const int slot = order ? order[place] : place;
  const float weight = weights ? weights[slot] : 1.0f;
  const size_t from = static_cast<size_t>(slot / top_k) * columns, to = static_cast<size_t>(place) * columns;
  float largest = 0.0f;
  for (int k = lane; k < columns; k += lanes) {
    const float value = sycl::fabs(load_float(x, kind, from + k) * weight);
    // a maximum would drop a NaN; as infinity it spoils its row, as it must
    largest = value <= largest ? largest : (value == value ? value : INF);
  }
  largest = sycl::reduce_over_group(item.get_group(), largest, sycl::maximum<float>());
  // a row that one code could not tell from nothing is nothing
  const float scale = largest / 127.0f;
  const float inverse = scale > 0.0f && scale < INF ? 127.0f / largest : 0.0f;
  for (int k = lane; k < columns; k += lanes) {
    const float value = load_float(x, kind, from + k) * weight * inverse;
    codes[to + k] = inverse == 0.0f || inverse == INF ? 0 : static_cast<signed char>(clipped(sycl::rint(value), -127.0f, 127.0f));
  }
  if (lane == 0) scales[place] = scale;
}

/// out[t] = scaling * sum over slots of weight * y[place], or each slot by itself; weights may be null.
HAL_KERNEL void sum_slots(const float *y, const int *places, const float *weights, int columns, int top_k, int reduce, float scaling,
                          void *out, int kind) {
  using namespace hal;
  const auto item = this_item();
  const size_t row = item.get_group(1);
  const int column = static_cast<int>(item.get_global_id(2));
  if (column >= columns) return;
  float total = 0.0f;
  for (int j = 0; j < top_k; ++j) {
    const size_t slot = row * top_k + j;
    const int place = places[slot];
    // a slot that goes nowhere adds nothing, whatever its weight
    const float term = place < 0 ? 0.0f : y[static_cast<size_t>(place) * columns + column] * (weights ? weights[slot] : 1.0f);
    if (reduce) total += term;
    else store_float(out, kind, slot * columns + column, term * scaling);
  }
  if (reduce) store_float(out, kind, row * columns + column, total * scaling);
}
