// The kernels of unpack.h in the compiler's generic vectors: each unit that includes this builds
// them for its own instruction set, in a namespace of its own.
//
// All of it is moving bytes, so the order of the memory accesses decides: a block of the input is
// read in runs of a few cache lines, turned in registers, and written in whole cache lines.
#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "unpack.h"

namespace hal_cpu {
namespace {

typedef uint32_t V8 __attribute__((vector_size(32)));
typedef uint16_t H16 __attribute__((vector_size(32)));
typedef uint8_t B32 __attribute__((vector_size(32)));
typedef uint16_t H8 __attribute__((vector_size(16)));
typedef uint8_t B16 __attribute__((vector_size(16)));
typedef uint64_t Q4 __attribute__((vector_size(32)));

constexpr int64_t kLine = 64;       // bytes of a cache line
constexpr int64_t kLineWords = 16;  // words of one
constexpr uint64_t kBytes = 0x0101010101010101u;

// A vector, or a word, at any address. Not through memcpy: gcc 12 copies by eights, and a vector that is
// read back from such stores waits for all of them.
template <class T>
struct At {
  typedef T Any __attribute__((aligned(1), may_alias));
};
template <class T>
inline T load(const uint8_t* p) {
  return *reinterpret_cast<const typename At<T>::Any*>(p);
}
template <class T>
inline void store(uint8_t* p, const T& value) {
  *reinterpret_cast<typename At<T>::Any*>(p) = value;
}

// Rows become columns.
inline void turn8(V8 (&v)[8]) {
  V8 t[8], u[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = __builtin_shuffle(v[i], v[i + 1], V8{0, 8, 1, 9, 4, 12, 5, 13});
    t[i + 1] = __builtin_shuffle(v[i], v[i + 1], V8{2, 10, 3, 11, 6, 14, 7, 15});
  }
  for (int i = 0; i < 8; i += 4) {
    for (int j = 0; j < 2; ++j) {
      u[i + 2 * j] = __builtin_shuffle(t[i + j], t[i + j + 2], V8{0, 1, 8, 9, 4, 5, 12, 13});
      u[i + 2 * j + 1] = __builtin_shuffle(t[i + j], t[i + j + 2], V8{2, 3, 10, 11, 6, 7, 14, 15});
    }
  }
  for (int i = 0; i < 4; ++i) {
    v[i] = __builtin_shuffle(u[i], u[i + 4], V8{0, 1, 2, 3, 8, 9, 10, 11});
    v[i + 4] = __builtin_shuffle(u[i], u[i + 4], V8{4, 5, 6, 7, 12, 13, 14, 15});
  }
}

// Bytes, or pairs of bytes, of two vectors in turn, of each half of 16 bytes.
inline H16 low_bytes(const V8& a, const V8& b) {
  return (H16)__builtin_shuffle((B32)a, (B32)b, B32{0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39,
                                                    16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55});
}
inline H16 high_bytes(const V8& a, const V8& b) {
  return (H16)__builtin_shuffle((B32)a, (B32)b, B32{8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47,
                                                    24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63});
}
inline V8 low_halves(const H16& a, const H16& b) {
  return (V8)__builtin_shuffle(a, b, H16{0, 16, 1, 17, 2, 18, 3, 19, 8, 24, 9, 25, 10, 26, 11, 27});
}
inline V8 high_halves(const H16& a, const H16& b) {
  return (V8)__builtin_shuffle(a, b, H16{4, 20, 5, 21, 6, 22, 7, 23, 12, 28, 13, 29, 14, 30, 15, 31});
}

// Whole lines past the cache: they would be fetched only to be overwritten.
inline void put_line(uint8_t* out, const V8& low, const V8& high, bool whole) {
  if (!whole) {
    store(out, low);
    store(out + 32, high);
    return;
  }
#ifdef __AVX2__
  _mm256_stream_si256(reinterpret_cast<__m256i*>(out), (__m256i)low);
  _mm256_stream_si256(reinterpret_cast<__m256i*>(out) + 1, (__m256i)high);
#else
  for (int i = 0; i < 2; ++i) {
    const V8& part = i ? high : low;
    const auto halves = reinterpret_cast<const uint8_t*>(&part);
    _mm_stream_si128(reinterpret_cast<__m128i*>(out) + 2 * i, load<__m128i>(halves));
    _mm_stream_si128(reinterpret_cast<__m128i*>(out) + 2 * i + 1, load<__m128i>(halves + 16));
  }
#endif
}

inline bool whole_lines(const uint8_t* out, int64_t row_bytes) {
  return (reinterpret_cast<uintptr_t>(out) | static_cast<uintptr_t>(row_bytes)) % kLine == 0;
}

inline uint32_t flip_of(const PackedWords& words) {
  if (!words.signed_codes) return 0;
  return words.bits == 4 ? 0x88888888u : 0x80808080u;
}

// With an odd count the last high nibble is nobody's.
inline void clear_spare(const PackedWords& words, uint8_t* row) {
  if (words.bits == 4 && words.count % 2) row[words.row_bytes() - 1] &= 15;
}

// Eight codes of 2 or 3 bits in each element, a byte each.
template <int kBits, class T>
inline T spread(T codes) {
  if (kBits == 3) {
    codes = (codes | codes << 20) & 0x00000fff00000fffu;
    codes = (codes | codes << 10) & 0x003f003f003f003fu;
    return (codes | codes << 5) & 0x0707070707070707u;
  }
  codes = (codes | codes << 24) & 0x000000ff000000ffu;
  codes = (codes | codes << 12) & 0x000f000f000f000fu;
  return (codes | codes << 6) & 0x0303030303030303u;
}

// `count` codes from a stream of whole words.
template <int kBits>
void expand(const uint8_t* stream, int64_t stream_bytes, bool signed_codes, int64_t count, uint8_t* out) {
  const uint64_t high = signed_codes ? 0x80 * kBytes : 0, half = signed_codes ? kBytes << (kBits - 1) : 0;
  const auto lower = [&](auto codes) { return ((codes | high) - half) ^ high; };
  constexpr uint8_t z = 16;  // a byte of the zeros
  constexpr B16 kFirst = kBits == 3 ? B16{0, 1, 2, z, z, z, z, z, 3, 4, 5, z, z, z, z, z}
                                    : B16{0, 1, z, z, z, z, z, z, 2, 3, z, z, z, z, z, z};
  constexpr B16 kSecond = kBits == 3 ? B16{6, 7, 8, z, z, z, z, z, 9, 10, 11, z, z, z, z, z}
                                     : B16{4, 5, z, z, z, z, z, z, 6, 7, z, z, z, z, z, z};
  int64_t i = 0;
  for (; i + 32 <= count && i / 8 * kBits + 16 <= stream_bytes; i += 32) {
    const B16 bytes = load<B16>(stream + i / 8 * kBits);
    const B16 parts[2] = {__builtin_shuffle(bytes, B16{}, kFirst), __builtin_shuffle(bytes, B16{}, kSecond)};
    const Q4 codes = load<Q4>(reinterpret_cast<const uint8_t*>(parts));
    store(out + i, lower(spread<kBits>(codes)));
  }
  for (; i < count; i += 8) {
    uint64_t codes = 0;
    std::memcpy(&codes, stream + i / 8 * kBits, static_cast<size_t>(std::min<int64_t>(kBits, stream_bytes - i / 8 * kBits)));
    codes = lower(spread<kBits>(codes));
    std::memcpy(out + i, &codes, static_cast<size_t>(std::min<int64_t>(8, count - i)));
  }
}

void expand(const PackedWords& words, const uint8_t* stream, int64_t stream_bytes, int64_t count, uint8_t* out) {
  if (words.bits == 3) {
    expand<3>(stream, stream_bytes, words.signed_codes, count, out);
  } else {
    expand<2>(stream, stream_bytes, words.signed_codes, count, out);
  }
}

void rows(const PackedWords& words, int64_t first, int64_t last, uint8_t* out) {
  const int64_t width = words.row_bytes(), step = words.columns * 4;
  for (int64_t r = first; r < last; ++r) {
    const uint8_t* in = words.data + r * step;
    uint8_t* row = out + r * width;
    if (words.bits < 4) {
      expand(words, in, step, words.count, row);
      continue;
    }
    const V8 flip = V8{} + flip_of(words);
    const bool whole = whole_lines(row, 0);
    int64_t i = 0;
    for (; i + kLine <= width; i += kLine)
      put_line(row + i, load<V8>(in + i) ^ flip, load<V8>(in + i + 32) ^ flip, whole);
    for (; i < width; ++i) row[i] = static_cast<uint8_t>(in[i] ^ flip[0]);
    clear_spare(words, row);
  }
  _mm_sfence();
}

constexpr int64_t kHigh = 32, kWide = 64;  // words of a block

// A whole block of words. It is copied first: as far apart as its lines lie in the file, they would
// fall into a few sets of the cache and push each other out.
inline void turn_block(const uint8_t* in, int64_t in_step, V8 flip, uint8_t* out, int64_t out_step, bool whole,
                       bool more) {
  constexpr int64_t kStep = kWide * 4 + 32;
  alignas(64) uint8_t lines[kHigh * kStep];
  const uint8_t* next = more ? in + kHigh * in_step : in;
  for (int64_t r = 0; r < kHigh; ++r) {
    for (int64_t i = 0; i < kWide * 4; i += 32) store(lines + r * kStep + i, load<V8>(in + r * in_step + i));
    // the next block lies where no prefetcher looks
    for (int64_t i = 0; i < kWide * 4; i += kLine) __builtin_prefetch(next + r * in_step + i, 0, 2);
  }
  for (int64_t c = 0; c < kWide; c += 8) {
    for (int64_t r = 0; r < kHigh; r += kLineWords) {
      V8 low[8], high[8];
      for (int i = 0; i < 8; ++i) {
        low[i] = load<V8>(lines + (r + i) * kStep + c * 4) ^ flip;
        high[i] = load<V8>(lines + (r + 8 + i) * kStep + c * 4) ^ flip;
      }
      turn8(low);
      turn8(high);
      for (int i = 0; i < 8; ++i) put_line(out + (c + i) * out_step + r * 4, low[i], high[i], whole);
    }
  }
}

// Words [rows, columns] to `out`, one row of `rows` words for each column of [first, last).
void turn_words(const uint8_t* in, int64_t rows, int64_t columns, int64_t first, int64_t last,
                uint32_t flip, uint8_t* out, int64_t out_step) {
  const bool whole = whole_lines(out, out_step);
  const int64_t in_step = columns * 4;
  for (int64_t r = 0; r < rows; r += kHigh) {
    const uint8_t* from = in + r * in_step;
    for (int64_t c = first; c < last; c += kWide) {
      uint8_t* to = out + (c - first) * out_step + r * 4;
      if (r + kHigh <= rows && c + kWide <= last) {
        turn_block(from + c * 4, in_step, V8{} + flip, to, out_step, whole, r + 2 * kHigh <= rows);
        continue;
      }
      for (int64_t j = 0; j < std::min(kWide, last - c); ++j)
        for (int64_t i = 0; i < std::min(kHigh, rows - r); ++i) {
          const uint32_t word = load<uint32_t>(from + i * in_step + (c + j) * 4) ^ flip;
          std::memcpy(to + j * out_step + i * 4, &word, 4);
        }
    }
  }
  _mm_sfence();
}

void columns(const PackedWords& words, int64_t first, int64_t last, uint8_t* out) {
  const int64_t width = words.row_bytes();
  if (words.bits >= 4) {
    turn_words(words.data, words.rows, words.columns, first, last, flip_of(words), out + first * width, width);
    return;
  }
  // a block of words that ends where a code ends, turned in cache and spread from there
  constexpr int64_t kRows = 96, kColumns = 64;
  alignas(64) uint8_t block[kColumns * kRows * 4];
  for (int64_t c = first; c < last; c += kColumns) {
    const int64_t wide = std::min(kColumns, last - c);
    for (int64_t r = 0; r < words.rows; r += kRows) {
      const int64_t high = std::min(kRows, words.rows - r), start = r * 32 / words.bits;
      turn_words(words.data + r * words.columns * 4, high, words.columns, c, c + wide, 0, block, kRows * 4);
      for (int64_t j = 0; j < wide; ++j)
        expand(words, block + j * kRows * 4, high * 4, std::min(high * 32 / words.bits, words.count - start),
               out + (c + j) * width + start);
    }
  }
}

// Eight rows of k of eight words. Element i of the result's vectors 2j and 2j + 1 holds the eight codes
// of one column in the order of k: the column of half j that kAwqColumn names for i % 4, of word
// 0, 1 (vectors 0 and 4), 2, 3 (1 and 5) and so on as the interleaving within 16 bytes leaves them.
inline void pair_rows(V8 (&row)[8], V8 flip, V8 (&word)[8]) {
  V8 pairs[2][4];
  for (int i = 0; i < 4; ++i) {
    const V8 even = row[2 * i], odd = row[2 * i + 1], moved = ((even >> 4) ^ odd) & 0x0f0f0f0fu;
    pairs[0][i] = even ^ (moved << 4) ^ flip;
    pairs[1][i] = odd ^ moved ^ flip;
  }
  for (int half = 0; half < 2; ++half) {
    const V8(&p)[4] = pairs[half];
    const H16 a = low_bytes(p[0], p[1]), b = low_bytes(p[2], p[3]);
    const H16 c = high_bytes(p[0], p[1]), d = high_bytes(p[2], p[3]);
    word[4 * half] = low_halves(a, b);
    word[4 * half + 1] = high_halves(a, b);
    word[4 * half + 2] = low_halves(c, d);
    word[4 * half + 3] = high_halves(c, d);
  }
}

constexpr int kAwqColumn[2][4] = {{0, 4, 1, 5}, {2, 6, 3, 7}};
constexpr int64_t kAwqWords = 128, kAwqCodes = 2 * kLine;

// Up to 128 rows of k of up to 16 words, as words of codes: block [2][8][16] vectors, the last of them k.
inline void pair_block(const PackedWords& words, int64_t k0, int64_t w0, int64_t wide, V8* block) {
  const V8 flip = V8{} + flip_of(words);
  const int64_t step = words.columns * 4;
  for (int64_t i = 0; i < kLineWords; ++i) {
    V8 row[2][8], word[8];
    for (int64_t j = 0; j < 8; ++j) {
      const int64_t k = k0 + 8 * i + j;
      const uint8_t* in = words.data + k * step + w0 * 4;
      uint8_t line[kLine] = {};
      if (k + kAwqCodes < words.rows) {
        __builtin_prefetch(in + kAwqCodes * step, 0, 2);
      } else if (k >= words.rows) {
        in = line;
      }
      if (wide < kLineWords && in != line) in = static_cast<uint8_t*>(std::memcpy(line, in, static_cast<size_t>(wide * 4)));
      row[0][j] = load<V8>(in);
      row[1][j] = load<V8>(in + 32);
    }
    for (int half = 0; half < 2; ++half) {
      pair_rows(row[half], flip, word);
      for (int j = 0; j < 8; ++j) block[(half * 8 + j) * kLineWords + i] = word[j];
    }
  }
}

// Rows of the result from such a block.
inline void put_block(const V8* block, int64_t wide, uint8_t* out, int64_t width, int64_t room, bool whole) {
  for (int64_t half = 0; half < 2; ++half) {
    for (int64_t j = 0; j < 8; ++j) {
      V8 low[8], high[8];
      for (int i = 0; i < 8; ++i) {
        low[i] = block[(half * 8 + j) * kLineWords + i];
        high[i] = block[(half * 8 + j) * kLineWords + 8 + i];
      }
      turn8(low);
      turn8(high);
      for (int i = 0; i < 8; ++i) {
        const int64_t word = 8 * half + j % 4 + i / 4 * 4;
        if (word >= wide) continue;
        uint8_t* to = out + (8 * word + kAwqColumn[j / 4][i % 4]) * width;
        if (room == kLine) {
          put_line(to, low[i], high[i], whole);
        } else {
          uint8_t bytes[kLine];
          store(bytes, low[i]);
          store(bytes + 32, high[i]);
          std::memcpy(to, bytes, static_cast<size_t>(room));
        }
      }
    }
  }
}

void awq(const PackedWords& words, int64_t first, int64_t last, uint8_t* out) {
  const int64_t width = words.row_bytes();
  const bool whole = whole_lines(out, width);
  V8 block[2 * 8 * kLineWords];
  for (int64_t w0 = first; w0 < last; w0 += kAwqWords) {
    const int64_t stop = std::min(w0 + kAwqWords, last);
    for (int64_t k0 = 0; k0 < words.count; k0 += kAwqCodes) {
      for (int64_t w = w0; w < stop; w += kLineWords) {
        const int64_t wide = std::min(kLineWords, stop - w);
        pair_block(words, k0, w, wide, block);
        put_block(block, wide, out + 8 * w * width + k0 / 2, width, std::min(kLine, width - k0 / 2), whole);
      }
    }
    for (int64_t n = 8 * w0; n < 8 * stop; ++n) clear_spare(words, out + n * width);
  }
  _mm_sfence();
}

// Eight rows of eight elements, each a column of the result.
inline void turn_block(const uint8_t* in, int64_t in_step, uint8_t* out, int64_t out_step, uint16_t) {
  H8 v[8], t[8];
  for (int i = 0; i < 8; ++i) v[i] = load<H8>(in + i * in_step);
  // three rounds that each join an element of the upper half of the rows to one of the lower
  for (int round = 0; round < 3; ++round) {
    for (int i = 0; i < 4; ++i) {
      t[2 * i] = __builtin_shuffle(v[i], v[i + 4], H8{0, 8, 1, 9, 2, 10, 3, 11});
      t[2 * i + 1] = __builtin_shuffle(v[i], v[i + 4], H8{4, 12, 5, 13, 6, 14, 7, 15});
    }
    std::copy(t, t + 8, v);
  }
  for (int i = 0; i < 8; ++i) store(out + i * out_step, v[i]);
}

inline void turn_block(const uint8_t* in, int64_t in_step, uint8_t* out, int64_t out_step, uint8_t) {
  B16 v[4], t[4];
  for (int i = 0; i < 4; ++i) {
    std::memcpy(&v[i], in + i * in_step, 8);
    std::memcpy(reinterpret_cast<uint8_t*>(&v[i]) + 8, in + (i + 4) * in_step, 8);
  }
  // rows i and i + 4 side by side: the same three rounds, the first of them within a vector
  for (int i = 0; i < 4; ++i)
    v[i] = __builtin_shuffle(v[i], B16{0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15});
  for (int round = 0; round < 2; ++round) {
    for (int i = 0; i < 2; ++i) {
      t[2 * i] = __builtin_shuffle(v[i], v[i + 2], B16{0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23});
      t[2 * i + 1] = __builtin_shuffle(v[i], v[i + 2], B16{8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31});
    }
    std::copy(t, t + 4, v);
  }
  for (int i = 0; i < 4; ++i) {
    std::memcpy(out + 2 * i * out_step, &v[i], 8);
    std::memcpy(out + (2 * i + 1) * out_step, reinterpret_cast<uint8_t*>(&v[i]) + 8, 8);
  }
}

template <class T>
void turn_small(const PlainMatrix& m, int64_t first, int64_t last, uint8_t* out) {
  constexpr int64_t size = sizeof(T);
  for (int64_t c = first; c < last; c += 8) {
    for (int64_t r = 0; r < m.rows; r += 8) {
      const uint8_t* in = m.data + (r * m.columns + c) * size;
      uint8_t* to = out + (c * m.rows + r) * size;
      if (r + 8 <= m.rows && c + 8 <= last) {
        turn_block(in, m.columns * size, to, m.rows * size, T{});
        continue;
      }
      for (int64_t j = 0; j < std::min<int64_t>(8, last - c); ++j)
        for (int64_t i = 0; i < std::min<int64_t>(8, m.rows - r); ++i)
          std::memcpy(to + (j * m.rows + i) * size, in + (i * m.columns + j) * size, size);
    }
  }
}

void turn(const PlainMatrix& m, int64_t first, int64_t last, uint8_t* out) {
  if (m.size == 1) {
    turn_small<uint8_t>(m, first, last, out);
  } else if (m.size == 2) {
    turn_small<uint16_t>(m, first, last, out);
  } else {
    turn_words(m.data, m.rows, m.columns, first, last, 0, out + first * m.rows * 4, m.rows * 4);
  }
}

}  // namespace
}  // namespace hal_cpu
