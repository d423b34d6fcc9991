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

// The hook of kernels that serve no operand with a gradient of this kind.
struct DScore {
  JAX_FLASH2_HD void operator()(int /*i*/, int /*j*/, float /*ds*/) const {}
};

// What a backward of the GPU does with d loss / d score of one pair: adds it to the gradient of the bias, whose elements
// may be shared by heads, batch rows, queries or keys.
struct BiasGradient {
  float* bias;  // of one (batch row, query head); null: no such gradient
  int64_t row, col;
  bool shared;

  JAX_FLASH2_HD void operator()(int i, int j, float ds) const {
    if (!bias) return;
    float* const to = bias + i * row + j * col;
#if defined(__CUDA_ARCH__)
    if (shared) {
      atomicAdd(to, ds);
      return;
    }
#endif
    *to += ds;
  }
};

}  // namespace jax_flash2
