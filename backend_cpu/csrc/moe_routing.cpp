#include "moe_routing.h"

#include <algorithm>

#include "error.h"

namespace hal_cpu {

std::vector<int32_t> local_experts(const IdCheck& c) {
  std::vector<int32_t> local(static_cast<size_t>(c.tokens * c.slots));
  for (int64_t i = 0; i < c.tokens * c.slots; ++i) {
    const int32_t id = c.ids[i];
    int32_t expert = id;
    if (id != -1) {
      if (id < 0 || id >= c.global_experts)
        fail("topk_ids: token ", i / c.slots, ", slot ", i % c.slots, " has expert id ", id,
             "; expected -1 (skip) or 0 to ", c.global_experts - 1);
      if (c.expert_map) {
        expert = c.expert_map[id];
        if (expert < -1 || expert >= c.local_experts)
          fail("expert_map[", id, "] is ", expert, " (token ", i / c.slots, ", slot ",
               i % c.slots, "); expected -1 (not here) or 0 to ", c.local_experts - 1);
      }
    }
    local[static_cast<size_t>(i)] = expert;
  }
  return local;
}

Routing route(const int32_t* local, int64_t pairs, int64_t experts) {
  std::vector<int32_t> next(static_cast<size_t>(experts) + 1, 0);
  for (int64_t i = 0; i < pairs; ++i)
    if (local[i] >= 0) ++next[static_cast<size_t>(local[i]) + 1];

  Routing r;
  for (int64_t e = 0; e < experts; ++e) {
    const int32_t count = next[static_cast<size_t>(e) + 1];
    if (count) r.experts.push_back({e, next[static_cast<size_t>(e)], count});
    next[static_cast<size_t>(e) + 1] += next[static_cast<size_t>(e)];
  }
  r.order.resize(static_cast<size_t>(next[static_cast<size_t>(experts)]));
  r.position.assign(static_cast<size_t>(pairs), -1);
  for (int64_t i = 0; i < pairs; ++i) {
    if (local[i] < 0) continue;
    const int32_t at = next[static_cast<size_t>(local[i])]++;
    r.order[static_cast<size_t>(at)] = static_cast<int32_t>(i);
    r.position[static_cast<size_t>(i)] = at;
  }
  return r;
}

std::vector<Band> cut_bands(const std::vector<Band>& bands, int64_t rows) {
  std::vector<Band> cut;
  for (const Band& b : bands)
    for (int64_t done = 0; done < b.count; done += rows)
      cut.push_back({b.expert, b.begin + done, std::min(rows, b.count - done)});
  return cut;
}

}  // namespace hal_cpu
