// Four-bit weights as they are stored: words of eight codes along K, [.., K/8, N]; scales, zeros and minimums [.., K/group, N].
#pragma once
#include "common.hpp"

namespace hal {

/// One matrix of every expert. w = (q - zero) * scale + minimum; zeros null: 8. minimums not null: no zeros. group: columns of a scale.
struct Int4Matrix {
  const uint32_t *words;
  const void *scales;
  const unsigned char *zeros;
  const void *minimums;
  int kind, group;
};

/// Eight weights of one column.
struct Eight4 {
  uint32_t codes;
  float zero, scale, minimum;

  Eight4() = default;
  /// Word `row` of K/8 in `column`, of the matrix of an expert; a group is whole words.
  Eight4(const Int4Matrix &m, size_t expert, int row, int column, int n, int k) {
    const size_t groups = (k + m.group - 1) / m.group;
    const size_t at = (expert * groups + row * 8 / m.group) * n + column;
    codes = m.words[(expert * (k / 8) + row) * n + column];
    scale = load_float(m.scales, m.kind, at);
    minimum = m.minimums ? load_float(m.minimums, m.kind, at) : 0.0f;
    zero = m.minimums ? 0.0f : (m.zeros ? static_cast<float>(m.zeros[at]) : 8.0f);
  }
  float code(int i) const { return static_cast<float>(codes >> 4 * i & 15) - zero; }
  float weight(int i) const { return code(i) * scale + minimum; }
};

} // namespace hal
