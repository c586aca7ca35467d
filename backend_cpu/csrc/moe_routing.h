// Which rows each expert gets.
#pragma once
#include <cstdint>
#include <vector>

namespace hal_cpu {

// Rows [begin, begin + count) of the sorted pairs, all of one expert.
struct Band {
  int64_t expert, begin, count;
};

// The (token, slot) pairs of some tokens sorted by local expert, in token order within one.
// A pair is token * slots + slot, counted from the first of these tokens.
struct Routing {
  std::vector<int32_t> order;     // sorted position -> pair
  std::vector<int32_t> position;  // pair -> sorted position, -1 if skipped
  std::vector<Band> experts;      // one band for each expert with any row
};

struct IdCheck {
  const int32_t* ids;
  int64_t tokens, slots;
  const int32_t* expert_map;  // or null
  int64_t global_experts, local_experts;
};

// Local expert of every pair, -1 to skip. Raises naming token, slot and id before any compute.
std::vector<int32_t> local_experts(const IdCheck& check);

Routing route(const int32_t* local, int64_t pairs, int64_t experts);

// Cuts bands longer than `rows`.
std::vector<Band> cut_bands(const std::vector<Band>& bands, int64_t rows);

}  // namespace hal_cpu
