// The four element types and their conversions to the type that sums are kept in. Knows no tile and no instruction set.
// Everything here has internal linkage: it is compiled once per instruction set, and the linker must not mix them.
#pragma once
#include <cstdint>

namespace jax_flash2::cpu {

struct BF16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

template <class E>
struct RealOf {
  using type = float;
};
template <>
struct RealOf<double> {
  using type = double;
};

namespace {

template <class To, class From>
inline To bits(From x) {
  return __builtin_bit_cast(To, x);
}

inline float load(float x) { return x; }
inline double load(double x) { return x; }
inline float load(BF16 x) { return bits<float>(uint32_t{x.bits} << 16); }
inline float load(F16 x) {
  // Exponent and mantissa move to float's place; a product by 2^112 corrects the bias and normalises subnormals.
  const uint32_t magnitude = uint32_t{x.bits & 0x7fffu} << 13;
  const float finite = bits<float>(magnitude) * 0x1p112f;
  const uint32_t u = magnitude >= 0x0f800000u ? magnitude | 0x7f800000u : bits<uint32_t>(finite);
  return bits<float>(u | uint32_t{x.bits & 0x8000u} << 16);
}

// Rounds to nearest even; NaN stays NaN.
inline void store(float* to, float x) { *to = x; }
inline void store(double* to, double x) { *to = x; }
inline void store(BF16* to, float x) {
  const uint32_t u = bits<uint32_t>(x);
  to->bits = static_cast<uint16_t>(x != x ? u >> 16 | 0x40u : (u + 0x7fffu + (u >> 16 & 1)) >> 16);
}
inline void store(F16* to, float x) {
  const uint32_t u = bits<uint32_t>(x), sign = u >> 16 & 0x8000u, a = u & 0x7fffffffu;
  const uint32_t small = bits<uint32_t>(bits<float>(a) + 0.5f) - 0x3f000000u;  // the float adder rounds at 2^-24
  const uint32_t normal = (a - 0x38000000u + 0xfffu + (a >> 13 & 1)) >> 13;     // may round up to infinity
  const uint32_t special = a > 0x7f800000u ? 0x7e00u : 0x7c00u;
  to->bits = static_cast<uint16_t>(sign | (a < 0x38800000u ? small : a < 0x47800000u ? normal : special));
}

}  // namespace
}  // namespace jax_flash2::cpu
