// What single codes stand for: the decoders by themselves, for tests of every code.
#pragma once
#include "narrow_floats.hpp"

/// out[i] = the number of codes[i]; bits: 8 for e4m3, 4 for e2m1.
HAL_KERNEL void decoded(const unsigned char *codes, int count, int bits, float *out) {
  const int at = static_cast<int>(hal::this_item().get_global_linear_id());
  if (at < count) out[at] = bits == 8 ? hal::from_e4m3(codes[at]) : hal::from_e2m1(codes[at]);
}
