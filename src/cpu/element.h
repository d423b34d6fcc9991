// The four element types and their conversions to the type that sums are kept in, one at a time or a vector at a time.
// Knows no tile and no instruction set. The functions have internal linkage: they are compiled once per instruction set,
// and the linker must not mix the results.
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

// F is float, U uint32_t and I int32_t, or vectors of them; the 16 bits lie in the low half of u.
template <class F, class U, class I>
struct Convert {
  template <class To, class From>
  static To bits(From x) {
    return __builtin_bit_cast(To, x);
  }

  static F widen(BF16, U u) { return bits<F>(u << 16); }

  // Exponent and mantissa move to float's place and the bias is corrected. Subnormals are given an implicit one, which is
  // taken away again: XLA's threads read a subnormal float as zero, so none may occur on the way.
  static F widen(F16, U u) {
    const U magnitude = (u & 0x7fffu) << 13, sign = (u & 0x8000u) << 16;
    const U normal = magnitude + 0x38000000u, small = bits<U>(bits<F>(magnitude + 0x38800000u) - 0x1p-14f);
    const U finite = bits<I>(magnitude) < 0x00800000 ? small : normal, special = magnitude | 0x7f800000u;
    return bits<F>(sign | (bits<I>(magnitude) < 0x0f800000 ? finite : special));
  }

  // Rounds to nearest even; NaN stays NaN.
  static U narrow(BF16, F x) {
    const U u = bits<U>(x), rounded = (u + (0x7fffu + (u >> 16 & 1u))) >> 16, quiet = u >> 16 | 0x40u;
    return x == x ? rounded : quiet;
  }
  static U narrow(F16, F x) {
    const U u = bits<U>(x), a = u & 0x7fffffffu;
    const U small = bits<U>(bits<F>(a) + 0.5f) - 0x3f000000u;              // the float adder rounds at 2^-24
    const U normal = (a - (0x38000000u - 0xfffu) + (a >> 13 & 1u)) >> 13;  // may round up to infinity
    const U infinite = (a & 0u) | 0x7c00u, nan = (a & 0u) | 0x7e00u;
    const U large = bits<I>(a) < 0x47800000 ? normal : bits<I>(a) > 0x7f800000 ? nan : infinite;
    return (u >> 16 & 0x8000u) | (bits<I>(a) < 0x38800000 ? small : large);
  }
};
using ConvertOne = Convert<float, uint32_t, int32_t>;

inline float load(float x) { return x; }
inline double load(double x) { return x; }
template <class E>
inline float load(E x) {
  return ConvertOne::widen(E{}, x.bits);
}

inline void store(float* to, float x) { *to = x; }
inline void store(double* to, double x) { *to = x; }
template <class E>
inline void store(E* to, float x) {
  to->bits = static_cast<uint16_t>(ConvertOne::narrow(E{}, x));
}

}  // namespace
}  // namespace jax_flash2::cpu
