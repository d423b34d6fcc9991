// What the pair of query i and key j adds to its score, read from the operands of a call where they lie: bias - ALiBi, or
// -inf where an operand removes the pair. Knows pointers and strides of one (batch row, query head); no tile and no pass.
#pragma once
#include <cmath>

#include "core/spec.h"

namespace jax_flash2 {

JAX_FLASH2_HD float bits_to_float(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  return __builtin_bit_cast(float, bits);
#endif
}

// On the host without a subnormal float on the way: XLA's threads read one as zero.
JAX_FLASH2_HD float f16_to_float(uint16_t h) {
#if defined(__CUDA_ARCH__)
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
  return x;
#else
  const uint32_t sign = uint32_t(h & 0x8000u) << 16, exponent = h >> 10 & 31u, mantissa = h & 0x3ffu;
  if (exponent == 0) return (sign ? -0x1p-24f : 0x1p-24f) * float(mantissa);
  return bits_to_float(sign | (exponent == 31 ? 0xffu : exponent + 112) << 23 | mantissa << 13);
#endif
}

template <class Real>
struct Addend {
  const uint8_t* mask = nullptr;  // absent, as for all pointers here
  int64_t mask_row = 0, mask_col = 0;
  const int32_t *query_ids = nullptr, *key_ids = nullptr;
  const void* bias = nullptr;
  int64_t bias_row = 0, bias_col = 0;
  DType bias_dtype = {};
  bool sloped = false;
  Real slope = 0;
  const int32_t* positions = nullptr;  // of queries among the keys; absent: i + off
  int off = 0;

  JAX_FLASH2_HD Real distance(int i, int j) const {
    const int d = (positions ? positions[i] : i + off) - j;
    return static_cast<Real>(d < 0 ? -d : d);
  }

  // For i < T and j < S, as what follows: whether mask and ids leave the pair.
  JAX_FLASH2_HD bool keeps(int i, int j) const {
    if (mask && !mask[i * mask_row + j * mask_col]) return false;
    return !query_ids || (query_ids[i] >= 0 && query_ids[i] == key_ids[j]);
  }

  JAX_FLASH2_HD Real at(int i, int j) const {
    if (!keeps(i, j)) return static_cast<Real>(-INFINITY);
    Real x = 0;
    if (bias) {
      with_bias_dtype(
          [&]<class Element>() { x = number(static_cast<const Element*>(bias)[i * bias_row + j * bias_col]); });
    }
    return sloped ? x - slope * distance(i, j) : x;
  }

  // Elements of the bias as they lie in memory, and as numbers.
  struct F16 {
    uint16_t bits;
  };
  struct BF16 {
    uint16_t bits;
  };
  static JAX_FLASH2_HD Real number(F16 x) { return f16_to_float(x.bits); }
  static JAX_FLASH2_HD Real number(BF16 x) { return bits_to_float(uint32_t{x.bits} << 16); }
  static JAX_FLASH2_HD Real number(float x) { return x; }
  // A finite float64 is a number in float32 too: only a true -inf removes a pair.
  static JAX_FLASH2_HD Real number(double x) {
    const double lowest = sizeof(Real) == 4 ? -0x1.fffffep127 : x;
    return static_cast<Real>(x < lowest && x > -INFINITY ? lowest : x);
  }
  // Calls body<class of the bias's elements>(): once for many, where that saves asking for each.
  template <class Body>
  JAX_FLASH2_HD void with_bias_dtype(const Body& body) const {
    switch (bias_dtype) {
      case DType::kF16: return body.template operator()<F16>();
      case DType::kBF16: return body.template operator()<BF16>();
      case DType::kF32: return body.template operator()<float>();
      default: return body.template operator()<double>();
    }
  }
};

}  // namespace jax_flash2
