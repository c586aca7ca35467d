// The places of single codes in a tile; see kv.h for the layout.
#include <cstring>

#include "error.h"
#include "kv_config.h"

namespace hal_cpu {
namespace {

// Visits each field of one plane of `BITS`-bit codes: f(word, shift, channel). `spread` depths
// share a line where two groups of channels do. The half of a line of single bits that is left where
// dim is an odd multiple of 16 has its words narrowed to 16 bits, a byte from each half.
template <int BITS, bool KEY, class F>
void each_field(int64_t dim, int64_t token, const F& f) {
  constexpr int64_t per_word = 32 / BITS;
  const auto shift_of = [](int64_t depth) {
    return depth % per_word % 2 * 16 + depth % per_word / 2 * BITS;
  };
  const auto place = [&](int64_t line, int64_t lane, int64_t shift, int64_t d) {
    if (BITS != 1 || line < dim / 32) return f(line * 16 + lane, shift, d);
    f(line * 16 + lane / 2, lane % 2 * 16 + shift / 16 * 8 + shift % 16, d);
  };
  if constexpr (KEY) {
    for (int64_t d = 0; d < dim; ++d) place(d / per_word, token, shift_of(d), d);
  } else {
    constexpr int64_t lines = BITS == 1 ? 1 : kKvTile / per_word;
    for (int64_t d = 0; d < dim; ++d) {
      const int64_t group = d / 16;
      if constexpr (BITS == 1)
        place(group / 2, d % 16, shift_of(token) + group % 2 * 8, d);
      else
        place(group * lines + token / per_word, d % 16, shift_of(token), d);
    }
  }
}

template <int BITS, bool KEY, int FROM>
void put_plane(int64_t dim, uint8_t* tile, int64_t token, const uint32_t* codes) {
  constexpr uint32_t mask = BITS == 32 ? ~0u : (1u << BITS % 32) - 1;
  auto* words = reinterpret_cast<uint32_t*>(tile);
  each_field<BITS, KEY>(dim, token, [&](int64_t word, int64_t shift, int64_t d) {
    words[word] = (words[word] & ~(mask << shift)) | (codes[d] >> FROM & mask) << shift;
  });
}

template <int BITS, bool KEY, int FROM>
void get_plane(int64_t dim, const uint8_t* tile, int64_t token, uint32_t* codes) {
  constexpr uint32_t mask = BITS == 32 ? ~0u : (1u << BITS % 32) - 1;
  const auto* words = reinterpret_cast<const uint32_t*>(tile);
  each_field<BITS, KEY>(dim, token, [&](int64_t word, int64_t shift, int64_t d) {
    codes[d] = (FROM ? codes[d] : 0) | (words[word] >> shift & mask) << FROM;
  });
}

template <bool KEY>
void put(const KvSide& side, uint8_t* tile, int64_t token, const uint32_t* codes) {
  switch (side.kind) {
    case kKvInt4:
    case kKvTable4:
      return put_plane<4, KEY, 0>(side.dim, tile, token, codes);
    case kKvTable3:
      put_plane<1, KEY, 2>(side.dim, tile + side.dim * 4, token, codes);
      [[fallthrough]];
    case kKvTable2:
      return put_plane<2, KEY, 0>(side.dim, tile, token, codes);
    case kKvBf16:
    case kKvFp16:
    case kKvInt16:
      return put_plane<16, KEY, 0>(side.dim, tile, token, codes);
    case kKvFp32:
      return put_plane<32, KEY, 0>(side.dim, tile, token, codes);
    default:
      return put_plane<8, KEY, 0>(side.dim, tile, token, codes);
  }
}

template <bool KEY>
void get(const KvSide& side, const uint8_t* tile, int64_t token, uint32_t* codes) {
  switch (side.kind) {
    case kKvInt4:
    case kKvTable4:
      return get_plane<4, KEY, 0>(side.dim, tile, token, codes);
    case kKvTable3:
      get_plane<2, KEY, 0>(side.dim, tile, token, codes);
      return get_plane<1, KEY, 2>(side.dim, tile + side.dim * 4, token, codes);
    case kKvTable2:
      return get_plane<2, KEY, 0>(side.dim, tile, token, codes);
    case kKvBf16:
    case kKvFp16:
    case kKvInt16:
      return get_plane<16, KEY, 0>(side.dim, tile, token, codes);
    case kKvFp32:
      return get_plane<32, KEY, 0>(side.dim, tile, token, codes);
    default:
      return get_plane<8, KEY, 0>(side.dim, tile, token, codes);
  }
}

}  // namespace

void put_codes(const KvSide& side, bool key, uint8_t* tile, int64_t token, const uint32_t* codes) {
  key ? put<true>(side, tile, token, codes) : put<false>(side, tile, token, codes);
}

void get_codes(const KvSide& side, bool key, const uint8_t* tile, int64_t token, uint32_t* codes) {
  key ? get<true>(side, tile, token, codes) : get<false>(side, tile, token, codes);
}

}  // namespace hal_cpu
