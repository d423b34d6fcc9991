// From dot products to scores, and from scores to powers, as the tensor-core kernels work them out.
#pragma once
#include <cmath>

#include "core/score.h"
#include "cuda/ptx/math.cuh"

namespace jax_flash2::cuda {

inline constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

// What Score::apply needs of a backend. tanh.approx is 2^-11 off, which a softcap of 50 would turn into 0.02.
struct Math {
  static __device__ __forceinline__ float scaled_tanh(float x, float in, float out) {
    return fmaf(-2.0f * out, ptx::rcp(1.0f + ptx::ex2(x * (in * (2.0f * kLog2e)))), out);
  }
};

// e^x.
struct Power {
  __device__ __forceinline__ float operator()(float x) const { return ptx::ex2(x * kLog2e); }
};

// All that a lane holds, from dot products to scores.
template <int kCols8>
__device__ __forceinline__ void apply(const Score<float>& score, float (&s)[kCols8][4]) {
  score.with_cap([&]<bool kCapped>() {
#pragma unroll
    for (int x = 0; x < kCols8 * 4; x++) s[x / 4][x % 4] = score.apply<Math, kCapped>(s[x / 4][x % 4]);
  });
}

}  // namespace jax_flash2::cuda
