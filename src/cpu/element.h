// The four element types and their conversions, one element at a time. Knows no tile and no instruction set.
#pragma once
#include <bit>
#include <cstdint>
#include <cstring>

namespace jax_flash2::cpu {

struct BF16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

// The type that sums are kept in.
template <class E>
struct RealOf {
  using type = float;
};
template <>
struct RealOf<double> {
  using type = double;
};

inline float load(float x) { return x; }
inline double load(double x) { return x; }
inline float load(BF16 x) { return std::bit_cast<float>(uint32_t{x.bits} << 16); }
inline float load(F16 x) {
  // Exponent and mantissa move to float's place, a product by 2^112 corrects the bias and normalises subnormals.
  const uint32_t magnitude = uint32_t{x.bits & 0x7fffu} << 13;
  float f = std::bit_cast<float>(magnitude) * 0x1p112f;
  if (magnitude >= 0x0f800000u) f = std::bit_cast<float>(magnitude | 0x7f800000u);
  return std::bit_cast<float>(std::bit_cast<uint32_t>(f) | uint32_t{x.bits & 0x8000u} << 16);
}

// Rounds to nearest even; NaN stays NaN.
inline void store(float* to, float x) { *to = x; }
inline void store(double* to, double x) { *to = x; }
inline void store(BF16* to, float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  to->bits = x != x ? (u >> 16) | 0x40u : (u + 0x7fffu + (u >> 16 & 1)) >> 16;
}
inline void store(F16* to, float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x), sign = u >> 16 & 0x8000u, a = u & 0x7fffffffu;
  uint32_t r;
  if (a >= 0x7f800000u) {
    r = a > 0x7f800000u ? 0x7e00u : 0x7c00u;
  } else if (a >= 0x47800000u) {  // 65536 and more; what rounds up to it overflows below
    r = 0x7c00u;
  } else if (a < 0x38800000u) {  // subnormal: let the float adder round at 2^-24
    r = std::bit_cast<uint32_t>(std::bit_cast<float>(a) + 0.5f) - 0x3f000000u;
  } else {
    r = (a - 0x38000000u + 0xfffu + (a >> 13 & 1)) >> 13;
  }
  to->bits = static_cast<uint16_t>(sign | r);
}

}  // namespace jax_flash2::cpu
