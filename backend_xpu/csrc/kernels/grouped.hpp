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

/// What becomes of the products of gate and up.
struct Epilogue {
  const float *gate_bias, *up_bias;
  void *out;
  int kind, activation;
  float alpha, limit;
};

} // namespace hal
