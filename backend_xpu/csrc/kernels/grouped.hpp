// Which tile of which expert a sub-group computes next: a persistent scheduler over counts that only the device knows.
#pragma once
#include "engine.hpp"

namespace hal {

/// Walks over the tiles of all experts, `step` tiles at a time. Sizes in rows and columns of one sub-group's tile.
class Tiles {
public:
  Tiles(const int *offsets, int experts, int tall, int wide, int columns, int first, int step)
      : offsets_(offsets), experts_(experts), tall_(tall), across_((columns + wide - 1) / wide), wide_(wide), next_(first), step_(step) {}

  /// Whether there is one more; then expert, row, rows (of this tile) and column say which.
  bool next() {
    for (; expert < experts_; ++expert) {
      const int first = offsets_[expert], count = offsets_[expert + 1] - first;
      const int tiles = (count + tall_ - 1) / tall_ * across_;
      if (next_ - passed_ < tiles) {
        const int at = next_ - passed_;
        // neighbours share the rows of A: columns are the fast direction
        const int down = at / across_;
        row = first + down * tall_;
        rows = count - down * tall_ < tall_ ? count - down * tall_ : tall_;
        column = (at - down * across_) * wide_;
        next_ += step_;
        return true;
      }
      passed_ += tiles;
    }
    return false;
  }
  int expert = 0, row = 0, rows = 0, column = 0;

private:
  const int *offsets_;
  int experts_, tall_, across_, wide_, next_, step_, passed_ = 0;
};

/// Of a sub-group: this walks over its share of the tiles of `tall` by `wide` and calls `each(tile)`.
template <typename F> inline void over_tiles(const int *offsets, int experts, int tall, int wide, int columns, F each) {
  const auto item = this_item();
  const auto group = item.get_sub_group();
  const int lanes = static_cast<int>(group.get_group_linear_range());
  const int first = static_cast<int>(item.get_group_linear_id()) * lanes + static_cast<int>(group.get_group_linear_id());
  Tiles tiles(offsets, experts, tall, wide, columns, first, static_cast<int>(item.get_group_range(2)) * lanes);
  while (tiles.next()) each(tiles);
}

/// A column of which there are TN more: beyond the last ones a tile repeats them, without a branch that would take its sums out of registers.
inline int within(int column, int n) { return column < n ? column : n - TN; }

/// What becomes of the products of gate and up.
struct Epilogue {
  const float *gate_bias, *up_bias;
  void *out;
  int kind, activation;
  float alpha, limit;
};

} // namespace hal

// Sub-groups of a work-group, and local memory for all of them.
#define HAL_NSG 4
#define HAL_LOCAL_WORDS (HAL_NSG * (hal::ENGINE_WORDS ? hal::ENGINE_WORDS : 1))
#define HAL_LOCAL(NAME) sycl::ext::oneapi::experimental::work_group_static<uint32_t[HAL_LOCAL_WORDS]> NAME

// The ladder: more rows of an expert, taller tiles (RM by RN). AMX has eight tile registers, and its tiles are twice as tall.
#if HAL_TM == 16
#define HAL_LADDER(MAKE, NAME, GATED) MAKE(NAME##_0, 1, 2 - GATED, GATED) MAKE(NAME##_1, 2, 2 - GATED, GATED)
#else
#define HAL_LADDER(MAKE, NAME, GATED)                                                                                                    \
  MAKE(NAME##_0, 1, 2 - GATED, GATED) MAKE(NAME##_1, 2, 2 - GATED, GATED) MAKE(NAME##_2, 4, 2 - GATED, GATED)                            \
  MAKE(NAME##_3, 4, 4 - 2 * GATED, GATED)
#endif
