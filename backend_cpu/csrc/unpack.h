// Kernels that bring a checkpoint's packed words into canonical order, a strip of the result at a time.
#pragma once
#include <cstdint>

namespace hal_cpu {

// Packed codes of a matrix: `rows` by `columns` words of 32 bits, at any address. `count` codes of
// `bits` bits lie along the packed dimension, and `signed_codes` wants them less half their range.
struct PackedWords {
  const uint8_t* data;
  int64_t rows, columns;
  int64_t count;
  int bits;
  bool signed_codes;

  // Canonical bytes of a row: nibble pairs of 4-bit codes, else a byte a code.
  int64_t row_bytes() const { return bits == 4 ? (count + 1) / 2 : count; }
};

struct PlainMatrix {
  const uint8_t* data;
  int64_t rows, columns, size;  // size: bytes of an element, 1, 2 or 4
};

// Each writes the canonical rows that it makes of [first, last) of the words' rows or columns.
struct UnpackKernels {
  void (*rows)(const PackedWords& words, int64_t first, int64_t last, uint8_t* out);
  void (*columns)(const PackedWords& words, int64_t first, int64_t last, uint8_t* out);
  // Eight outputs for each column of words.
  void (*awq)(const PackedWords& words, int64_t first, int64_t last, uint8_t* out);
  void (*turn)(const PlainMatrix& matrix, int64_t first, int64_t last, uint8_t* out);
};

extern const UnpackKernels kUnpackPlain;
extern const UnpackKernels kUnpackAvx2;

}  // namespace hal_cpu
