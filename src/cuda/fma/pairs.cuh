// What the kernels do to each pair of a query and a key: score, operands, dropout, the gradient of a bias. Acts on a
// thread's elements of a panel in shared memory, in a loop that is not unrolled, so that the code of the operands exists once
// and takes no registers from products; blocks whose pairs the ranges of the mask decide alone never come here.
#pragma once
#include <cuda_runtime.h>

#include <cmath>
#include <type_traits>

#include "core/problem.h"
#include "cuda/fma/panel.cuh"
#include "cuda/score.cuh"

namespace jax_flash2::cuda::fma {

// e^x. Power's product is rounded relative to x: where it counts, e^x is too small to tell. expf takes three times as long.
template <class Real>
__device__ __forceinline__ Real power(Real x) {
  if constexpr (std::is_same_v<Real, float>) {
    return Power{}(x);
  } else {
    return exp(x);
  }
}

// What Score::apply needs of a backend, with the accuracy of its numbers.
struct Math {
  template <class Real>
  static __device__ __forceinline__ Real scaled_tanh(Real x, Real in, Real out) {
    return out * tanh(in * x);
  }
};

// The operands of one (batch row, query head).
template <class Real>
struct Pairs {
  Mask mask;
  Addend<Real> addend;
  uint32_t adds;  // a bit for each operand of it
  Dropout<Real> dropout;
  Score<Real> score;

  static __device__ __forceinline__ Pairs make(const Problem& p, const Batch& b, int n, const Mask& mask) {
    const Addend<Real> a = p.addend<Real>(b, n, mask);
    const uint32_t adds = (a.mask ? 1u : 0u) | (a.query_ids ? 2u : 0u) | (a.bias ? 4u : 0u) | (a.sloped ? 8u : 0u);
    return {mask, a, adds, p.dropout<Real>(b, n), p.score<Real>(b, n)};
  }

  // What operands add to the score of a pair that the mask keeps or not; -inf: the pair is removed.
  __device__ __forceinline__ Real added(int i, int j, bool visible) const {
    return !visible ? Real(-INFINITY) : adds ? addend.at(i, j) : Real(0);
  }
};

// What a backward knows of a pair.
template <class Real>
struct Pair {
  int at;  // of its element in panels
  int query, key;
  bool visible;
  Real probability, factor;  // 0 where it is not visible; what dropout multiplies it by
  Real d_score;              // of the score by the scaled product
  Real distance;             // that a slope multiplies
};

// The gradient of the bias of one (batch row, query head), whose elements may be shared.
template <class Real>
struct BiasGradient {
  Real* data_g;  // null: none
  int64_t row, col;
  bool shared;

  static __device__ __forceinline__ BiasGradient make(const Problem& p, const Batch& b, int n) {
    const Tensor& bias = p.grads.bias;
    return {bias.present() ? bias.at<Real>(b, n) : nullptr, bias.row, bias.col, p.bias_is_shared()};
  }

  __device__ __forceinline__ void add(int i, int j, Real ds) const {
    if (!data_g) return;
    Real* const to = data_g + i * row + j * col;
    if (shared) {
      atomicAdd(to, ds);
    } else {
      *to = ds;  // this pair's own
    }
  }
};

// Calls body(r, c) for this thread's blocks of elements (r, r + 1) x (c, c + 1).
template <class Real, class Body>
__device__ __forceinline__ void each_block(const Body& body) {
  constexpr int kAcross = Panel<Real>::kCols / 2, kBlocks = Panel<Real>::kRows / 2 * kAcross;
#pragma unroll 1
  for (int block = 0; block < kBlocks; block++) body(block / kAcross * 2, block % kAcross * 2);
}

// This thread's elements between registers and a panel.
template <class Real>
__device__ __forceinline__ void store_elements(Real* panel_s, const Elements<Real>& x, const Lane<Real>& lane) {
#pragma unroll
  for (int r = 0; r < Panel<Real>::kRows; r++) {
#pragma unroll
    for (int c = 0; c < Panel<Real>::kCols; c++) panel_s[lane.at(r, c)] = x[r][c];
  }
}
template <class Real>
__device__ __forceinline__ void load_elements(Elements<Real>& x, const Real* panel_s, const Lane<Real>& lane) {
#pragma unroll
  for (int r = 0; r < Panel<Real>::kRows; r++) {
#pragma unroll
    for (int c = 0; c < Panel<Real>::kCols; c++) x[r][c] = panel_s[lane.at(r, c)];
  }
}

}  // namespace jax_flash2::cuda::fma
