// One sub-group's matrix product C[TM, TN] += A[TM, KB bytes] * B, in three engines with one interface:
//   HAL_JOINT_MATRIX  sycl::joint_matrix: XMX of Intel GPUs, AMX of their processors
//   HAL_DPAS          the builtins of the DPAS instruction, whose lane layout is written out here; GPUs alone
//   HAL_EMULATION     the same lane layout by sub-group shuffles; every device
// A is row major. B is packed: a 32-bit word holds the KB/4 consecutive k of one column, so that row j of B is TN words.
// Lane n of a sub-group stands for column n: TN is the size of the sub-group.
#pragma once
#include "common.hpp"

#define HAL_EMULATION 0
#define HAL_DPAS 1
#define HAL_JOINT_MATRIX 2
#ifndef HAL_ENGINE
#define HAL_ENGINE HAL_EMULATION
#endif
// Rows of a tile, and bytes of K of a step: 8 and 32 on XMX; AMX takes 16 and 64 too.
#ifndef HAL_TM
#define HAL_TM 8
#endif
#ifndef HAL_KB
#define HAL_KB 32
#endif
#if HAL_ENGINE != HAL_JOINT_MATRIX && (HAL_TM != 8 || HAL_KB != 32)
#error "the DPAS lane layout has 8 rows and 32 bytes of K"
#endif
#if HAL_ENGINE == HAL_JOINT_MATRIX
#include <sycl/ext/oneapi/matrix/matrix.hpp>
#endif

// Registers are addressed by constants, so loops over tiles (HAL_LOOP) are unrolled where these are registers, and loops over the parts
// of one (HAL_PART) where the parts are; elsewhere they would be copies of much code.
#define HAL_ROLLED _Pragma("clang loop unroll(disable)")
#define HAL_UNROLLED _Pragma("unroll")
#if HAL_ENGINE == HAL_EMULATION
#define HAL_LOOP HAL_ROLLED
#else
#define HAL_LOOP HAL_UNROLLED
#endif
#if HAL_ENGINE == HAL_DPAS
#define HAL_PART HAL_UNROLLED
#else
#define HAL_PART HAL_ROLLED
#endif

namespace hal {

constexpr int TM = HAL_TM, TN = HAL_SG, KB = HAL_KB, B_ROWS = KB / 4;

template <typename T> struct Sum { using type = float; };
template <> struct Sum<signed char> { using type = int; };

/// Local memory of one sub-group that an engine may use, in 32-bit words.
constexpr int ENGINE_WORDS = HAL_ENGINE == HAL_JOINT_MATRIX ? (TM > B_ROWS ? TM : B_ROWS) * TN : 0;

#if HAL_ENGINE == HAL_JOINT_MATRIX

namespace mx = sycl::ext::oneapi::experimental::matrix;

template <typename T> struct Engine {
  using Acc = typename Sum<T>::type;
  static constexpr int K = KB / sizeof(T), PACK = 4 / sizeof(T);
  using A = mx::joint_matrix<sycl::sub_group, T, mx::use::a, TM, K, mx::layout::row_major>;
  using B = mx::joint_matrix<sycl::sub_group, T, mx::use::b, K, TN, mx::layout::ext_intel_packed>;
  using C = mx::joint_matrix<sycl::sub_group, Acc, mx::use::accumulator, TM, TN>;

  template <sycl::access::address_space S, typename P> static auto in(P *pointer) {
    return sycl::address_space_cast<S, sycl::access::decorated::no>(pointer);
  }
  static void zero(sycl::sub_group group, C &c) { mx::joint_matrix_fill(group, c, Acc(0)); }
  static void load_a(sycl::sub_group group, A &a, const T *from, size_t pitch) {
    mx::joint_matrix_load(group, a, in<sycl::access::address_space::global_space>(const_cast<T *>(from)), pitch);
  }
  static void load_b(sycl::sub_group group, B &b, const uint32_t *from, size_t pitch) {
    auto *elements = reinterpret_cast<T *>(const_cast<uint32_t *>(from));
    mx::joint_matrix_load(group, b, in<sycl::access::address_space::global_space>(elements), pitch * PACK);
  }
  template <typename F> static void make_b(sycl::sub_group group, B &b, uint32_t *local, F word) {
    const int lane = group.get_local_linear_id();
    sycl::group_barrier(group); // what was made before has been loaded
    HAL_PART for (int j = 0; j < B_ROWS; ++j) local[j * TN + lane] = word(j);
    sycl::group_barrier(group);
    mx::joint_matrix_load(group, b, in<sycl::access::address_space::local_space>(reinterpret_cast<T *>(local)), TN * PACK);
  }
  static void mad(sycl::sub_group group, C &c, const A &a, const B &b) { mx::joint_matrix_mad(group, c, a, b, c); }
  /// `f(row, value)` for the rows of the lane's own column.
  template <typename F> static void each(sycl::sub_group group, C &c, uint32_t *local, F f) {
    auto *sums = reinterpret_cast<Acc *>(local);
    const int lane = group.get_local_linear_id();
    sycl::group_barrier(group);
    mx::joint_matrix_store(group, c, in<sycl::access::address_space::local_space>(sums), TN, mx::layout::row_major);
    sycl::group_barrier(group);
    HAL_PART for (int i = 0; i < TM; ++i) f(i, sums[i * TN + lane]);
  }
};

#else

// A row of a step is 32 bytes: 16 lanes hold two of them each, 8 lanes four.
#if HAL_SG == 16
using Lane = short;
#elif HAL_SG == 8
using Lane = int;
#else
#error "DPAS has sub-groups of 8 and of 16"
#endif
using Rows = Lane __attribute__((ext_vector_type(8)));
using Words = int __attribute__((ext_vector_type(8)));
using Floats = float __attribute__((ext_vector_type(8)));
template <typename Acc> struct Eight { using type = Floats; };
template <> struct Eight<int> { using type = Words; };

#if HAL_ENGINE == HAL_DPAS && defined(__SYCL_DEVICE_ONLY__)
} // namespace hal
SYCL_EXTERNAL hal::Words intel_sub_group_i8_i8_matrix_mad_k32(hal::Rows a, hal::Words b, hal::Words c);
SYCL_EXTERNAL hal::Floats intel_sub_group_bf16_bf16_matrix_mad_k16(hal::Rows a, hal::Words b, hal::Floats c);
SYCL_EXTERNAL hal::Floats intel_sub_group_f16_f16_matrix_mad_k16(hal::Rows a, hal::Words b, hal::Floats c);
namespace hal {
inline Words dpas(Rows a, Words b, Words c, signed char) { return intel_sub_group_i8_i8_matrix_mad_k32(a, b, c); }
inline Floats dpas(Rows a, Words b, Floats c, bf16) { return intel_sub_group_bf16_bf16_matrix_mad_k16(a, b, c); }
inline Floats dpas(Rows a, Words b, Floats c, half) { return intel_sub_group_f16_f16_matrix_mad_k16(a, b, c); }
#endif

inline int dot(int a, int b, int sum, signed char) {
  for (int i = 0; i < 32; i += 8) sum += static_cast<signed char>(a >> i) * static_cast<signed char>(b >> i);
  return sum;
}
template <typename T> inline float dot(int a, int b, float sum, T) {
  for (int i = 0; i < 32; i += 16) {
    const auto left = sycl::bit_cast<T>(static_cast<uint16_t>(a >> i)), right = sycl::bit_cast<T>(static_cast<uint16_t>(b >> i));
    sum += widened(left) * widened(right);
  }
  return sum;
}

/// Word `d` of a row, which the lanes hold in pieces.
inline int word_of_row(sycl::sub_group group, Lane held, int d) {
#if HAL_SG == 16
  const auto low = static_cast<uint16_t>(sycl::select_from_group(group, held, 2 * d));
  const auto high = static_cast<uint16_t>(sycl::select_from_group(group, held, 2 * d + 1));
  return static_cast<int>(low | static_cast<uint32_t>(high) << 16);
#else
  return sycl::select_from_group(group, held, d);
#endif
}

template <typename T> struct Engine {
  using Acc = typename Sum<T>::type;
  static constexpr int K = KB / sizeof(T), PACK = 4 / sizeof(T);
  using A = Rows;
  using B = Words;
  using C = typename Eight<Acc>::type;

  static void zero(sycl::sub_group, C &c) { c = Acc(0); }
  static void load_a(sycl::sub_group group, A &a, const T *from, size_t pitch) {
    const int lane = group.get_local_linear_id();
    HAL_PART for (int i = 0; i < TM; ++i) a[i] = reinterpret_cast<const Lane *>(from + i * pitch)[lane];
  }
  static void load_b(sycl::sub_group group, B &b, const uint32_t *from, size_t pitch) {
    const int lane = group.get_local_linear_id();
    HAL_PART for (int j = 0; j < B_ROWS; ++j) b[j] = static_cast<int>(from[j * pitch + lane]);
  }
  template <typename F> static void make_b(sycl::sub_group, B &b, uint32_t *, F word) {
    HAL_PART for (int j = 0; j < B_ROWS; ++j) b[j] = static_cast<int>(word(j));
  }
  static void mad(sycl::sub_group group, C &c, const A &a, const B &b) {
#if HAL_ENGINE == HAL_DPAS && defined(__SYCL_DEVICE_ONLY__)
    c = dpas(a, b, c, T{});
#else
    HAL_PART for (int i = 0; i < TM; ++i) {
      Acc sum = c[i];
      HAL_PART for (int d = 0; d < B_ROWS; ++d) sum = dot(word_of_row(group, a[i], d), b[d], sum, T{});
      c[i] = sum;
    }
#endif
  }
  template <typename F> static void each(sycl::sub_group, C &c, uint32_t *, F f) {
    HAL_PART for (int i = 0; i < TM; ++i) f(i, static_cast<Acc>(c[i]));
  }
};

#endif

} // namespace hal
