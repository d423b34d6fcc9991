// A vector of the widest registers of the instruction set this file is compiled for, with exp and tanh.
// Knows no tile. Internal linkage throughout, for the reason given in element.h.
#pragma once
#include <cstdint>
#include <utility>

#include "cpu/element.h"

namespace jax_flash2::cpu {
namespace {

#if defined(__AVX512F__)
inline constexpr int kVectorBytes = 64, kRegisters = 32;
#elif defined(__AVX2__)
inline constexpr int kVectorBytes = 32, kRegisters = 16;
#elif defined(__aarch64__)
inline constexpr int kVectorBytes = 16, kRegisters = 32;
#else
inline constexpr int kVectorBytes = 16, kRegisters = 16;
#endif

template <class Real>
inline constexpr int kWidth = kVectorBytes / sizeof(Real);

template <class Real>
struct VectorOf;
template <>
struct VectorOf<float> {
  typedef float V __attribute__((vector_size(kVectorBytes)));
  typedef int32_t I __attribute__((vector_size(kVectorBytes)));
  typedef uint32_t U __attribute__((vector_size(kVectorBytes)));
  typedef uint16_t Half __attribute__((vector_size(kVectorBytes / 2)));
  using Int = int32_t;
};
template <>
struct VectorOf<double> {
  typedef double V __attribute__((vector_size(kVectorBytes)));
  typedef int64_t I __attribute__((vector_size(kVectorBytes)));
  using Int = int64_t;
};
template <class Real>
using Vec = typename VectorOf<Real>::V;

template <class Real>
inline Vec<Real> get(const Real* aligned) {
  Vec<Real> v;
  __builtin_memcpy(&v, __builtin_assume_aligned(aligned, kVectorBytes), sizeof v);
  return v;
}
template <class Real>
inline void put(Real* aligned, Vec<Real> v) {
  __builtin_memcpy(__builtin_assume_aligned(aligned, kVectorBytes), &v, sizeof v);
}
template <class Real>
inline Vec<Real> splat(Real x) {
  return x - Vec<Real>{};
}

// A vector of elements at any address, and back, rounded to nearest even.
template <class E>
inline Vec<typename RealOf<E>::type> load_vector(const E* from) {
  using Types = VectorOf<typename RealOf<E>::type>;
  if constexpr (sizeof(E) == 2) {
    typename Types::Half half;
    __builtin_memcpy(&half, from, sizeof half);
    using U = typename Types::U;
    return Convert<typename Types::V, U, typename Types::I>::widen(E{}, __builtin_convertvector(half, U));
  } else {
    typename Types::V v;
    __builtin_memcpy(&v, from, sizeof v);
    return v;
  }
}
template <class E>
inline void store_vector(E* to, Vec<typename RealOf<E>::type> v) {
  using Types = VectorOf<typename RealOf<E>::type>;
  if constexpr (sizeof(E) == 2) {
    using Half = typename Types::Half;
    const auto u = Convert<typename Types::V, typename Types::U, typename Types::I>::narrow(E{}, v);
    const Half half = __builtin_convertvector(u, Half);
    __builtin_memcpy(to, &half, sizeof half);
  } else {
    __builtin_memcpy(to, &v, sizeof v);
  }
}

// Element i of every pair of rows (r, r + kStep) whose bit kStep is the other's, exchanged.
template <class Real, int kStep, int... i>
inline void exchange(Vec<Real>& low, Vec<Real>& high, std::integer_sequence<int, i...>) {
  constexpr int W = kWidth<Real>;
  const Vec<Real> a = low, b = high;
#if defined(__clang__)
  low = __builtin_shufflevector(a, b, (i & kStep ? W + i - kStep : i)...);
  high = __builtin_shufflevector(a, b, (i & kStep ? W + i : i + kStep)...);
#else
  using I = typename VectorOf<Real>::I;
  low = __builtin_shuffle(a, b, I{(i & kStep ? W + i - kStep : i)...});
  high = __builtin_shuffle(a, b, I{(i & kStep ? W + i : i + kStep)...});
#endif
}

template <class Real, int kStep = kWidth<Real> / 2>
inline void transpose_square(Vec<Real> (&rows)[kWidth<Real>]) {
#pragma GCC unroll 16
  for (int r = 0; r < kWidth<Real>; r++)
    if (!(r & kStep)) exchange<Real, kStep>(rows[r], rows[r + kStep], std::make_integer_sequence<int, kWidth<Real>>{});
  if constexpr (kStep > 1) transpose_square<Real, kStep / 2>(rows);
}

template <class Real>
inline constexpr Real kInf = static_cast<Real>(__builtin_inf());

// exp by Cody and Waite: x = n ln2 + r, |r| <= ln2 / 2, exp(r) = 1 + r + r^2 g(r), g interpolated at Chebyshev nodes:
// its error is below 8e-9 (float) and 2e-19 (double). n is read off the low bits of x / ln2 + 1.5 * 2^(mantissa bits).
template <class Real>
struct ExpConstants;
template <>
struct ExpConstants<float> {
  static constexpr float kMin = -87.33654f, kMagic = 0x1.8p23f, kLog2e = 0x1.715476p0f;
  static constexpr float kLn2High = 0x1.62ep-1f, kLn2Low = 0x1.0bfbe8p-15f;  // n * high is exact
  static constexpr float kG[] = {0.5f, 0.16666576666f, 0.041666554212f, 0.0083632328837f, 0.0013926250832f};
  static constexpr int kMantissa = 23, kBias = 127;
};
template <>
struct ExpConstants<double> {
  static constexpr double kMin = -708.396418532264, kMagic = 0x1.8p52, kLog2e = 0x1.71547652b82fep0;
  static constexpr double kLn2High = 0x1.62e42fefa2p-1, kLn2Low = 0x1.9ef35793c7673p-41;
  static constexpr double kG[] = {0x1.0000000000000p-1,  0x1.5555555555557p-3,  0x1.5555555555556p-5,
                                  0x1.11111111100bep-7,  0x1.6c16c16c162c3p-10, 0x1.a01a01abf85abp-13,
                                  0x1.a01a01a6e1e2ap-16, 0x1.71de01fdbf9cap-19, 0x1.27e4db46cddd1p-22,
                                  0x1.af4e554377204p-26, 0x1.1f7340dbc337ep-29};
  static constexpr int kMantissa = 52, kBias = 1023;
};

template <class Real>
struct Exponential {  // exp(x) = power * (1 + fraction)
  Vec<Real> power, fraction;
};

// For x in [kMin, -kMin]; a NaN gives NaN.
template <class Real>
inline Exponential<Real> exponential(Vec<Real> x) {
  using C = ExpConstants<Real>;
  using I = typename VectorOf<Real>::I;
  using Int = typename VectorOf<Real>::Int;
  const Vec<Real> shifted = x * C::kLog2e + C::kMagic, n = shifted - C::kMagic;
  const Vec<Real> r = (x - n * C::kLn2High) - n * C::kLn2Low;
  constexpr int kTerms = sizeof C::kG / sizeof C::kG[0];
  Vec<Real> g = splat(C::kG[kTerms - 1]);
#pragma GCC unroll 16
  for (int t = kTerms - 2; t >= 0; t--) g = g * r + C::kG[t];
  const I power = ((I)shifted << C::kMantissa) + (Int{C::kBias} << C::kMantissa);
  return {(Vec<Real>)power, (g * r) * r + r};
}

// exp(x) for x <= -kMin: 0 below the smallest normal number, NaN for NaN.
template <class Real>
inline Vec<Real> exp(Vec<Real> x) {
  using C = ExpConstants<Real>;
  const Vec<Real> low = splat(C::kMin);
  const Exponential<Real> e = exponential<Real>(low > x ? low : x);
  const Vec<Real> y = e.power * e.fraction + e.power;
  return low > x ? Vec<Real>{} : y;
}

// tanh(x) = (1 - e) / (1 + e), e = exp(-2 |x|), from e - 1, which keeps the relative error small near 0.
template <class Real>
inline Vec<Real> tanh(Vec<Real> x) {
  const Vec<Real> most = splat(Real(sizeof(Real) == 4 ? 10 : 20));  // tanh is 1 from here on
  const Vec<Real> negative = x < Vec<Real>{} ? x : -x;
  const Vec<Real> a = -most > negative ? -most : negative;
  const Exponential<Real> e = exponential<Real>(a + a);
  const Vec<Real> less_one = e.power * e.fraction + (e.power - Real(1));
  const Vec<Real> y = less_one / (less_one + Real(2));
  return x < Vec<Real>{} ? y : -y;
}

// What Score needs.
template <class Real>
struct Math {
  static Vec<Real> scaled_tanh(Vec<Real> x, Real in, Real out) { return cpu::tanh<Real>(x * in) * out; }
};

}  // namespace
}  // namespace jax_flash2::cpu
