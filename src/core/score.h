// What happens to one score, and its derivative: scale -> softcap; what operands add after that is Addend. Knows no
// position in memory, tile or pass.
#pragma once
#include "core/spec.h"

namespace jax_flash2 {

// V is a scalar or a SIMD vector of Real. Math gives scaled_tanh(x, in, out) = out * tanh(in * x) for V: each backend
// brings its own.
template <class Real>
struct Score {
  Real scale, softcap;  // softcap 0: none

  // Calls body<whether scores are capped>(): once for many, for a branch at each would keep them apart.
  template <class Body>
  JAX_FLASH2_HD void with_cap(const Body& body) const {
    if (softcap != Real(0)) {
      body.template operator()<true>();
    } else {
      body.template operator()<false>();
    }
  }

  // The score of a dot product, in natural units.
  template <class Math, bool kCapped, class V>
  JAX_FLASH2_HD V apply(V qk) const {
    if constexpr (kCapped) return Math::scaled_tanh(qk, scale / softcap, softcap);
    return qk * scale;
  }
  template <class Math, class V>
  JAX_FLASH2_HD V apply(V qk) const {
    return softcap != Real(0) ? apply<Math, true>(qk) : apply<Math, false>(qk);
  }

  // d score / d (scale * qk) from the score that `apply` gave; multiply by `scale` for d / d qk.
  template <bool kCapped, class V>
  JAX_FLASH2_HD V slope(V s) const {
    if constexpr (!kCapped) return V{} + Real(1);
    const V t = s * (Real(1) / softcap);
    return Real(1) - t * t;
  }
  template <class V>
  JAX_FLASH2_HD V slope(V s) const {
    return softcap != Real(0) ? slope<true>(s) : slope<false>(s);
  }
};

}  // namespace jax_flash2
