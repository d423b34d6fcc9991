// What happens to one score, and its derivative: scale -> softcap; what operands add after that is Addend. Knows no
// position in memory, tile or pass.
#pragma once
#include "core/spec.h"

namespace jax_flash2 {

// V is a scalar or a SIMD vector of Real. Math gives tanh for V: each backend brings its own.
template <class Real>
struct Score {
  Real scale, softcap;  // softcap 0: none

  // The score of query i and key j from their dot product, in natural units.
  template <class Math, class V>
  JAX_FLASH2_HD V apply(V qk, int /*i*/, int /*j*/) const {
    const V s = qk * scale;
    return softcap != Real(0) ? Math::tanh(s * (Real(1) / softcap)) * softcap : s;
  }

  // d score / d (scale * qk) from the score that `apply` gave; multiply by `scale` for d / d qk.
  template <class V>
  JAX_FLASH2_HD V slope(V s) const {
    if (softcap == Real(0)) return V{} + Real(1);
    const V t = s * (Real(1) / softcap);
    return Real(1) - t * t;
  }
};

}  // namespace jax_flash2
