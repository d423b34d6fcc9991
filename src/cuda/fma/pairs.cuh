// What the float32 kernels do to each pair of a query and a key: score, operands, dropout. Acts on a thread's elements
// of a panel in shared memory, in a loop that is not unrolled, so that the code of the operands exists once and takes no
// registers from products; blocks whose pairs the ranges of the mask decide alone never come here.
#pragma once
#include <cuda_runtime.h>

#include <cmath>

#include "core/problem.h"
#include "cuda/fma/panel.cuh"
#include "cuda/operands.cuh"
#include "cuda/ptx/math.cuh"

namespace jax_flash2::cuda::fma {

// e^x. The product's rounding is relative to x: where it counts, e^x is too small to tell. expf takes three times as long.
__device__ __forceinline__ float power(float x) { return ptx::ex2(x * 1.4426950408889634f); }

// What Score::apply needs of a backend, with the accuracy of float32.
struct Math {
  static __device__ __forceinline__ float scaled_tanh(float x, float in, float out) { return out * tanhf(in * x); }
};

// The operands of one (batch row, query head).
struct Pairs : Operands {
  Score<float> score;

  static __device__ __forceinline__ Pairs make(const Problem& p, const Batch& b, int n, const Mask& mask) {
    Pairs pairs;
    pairs.mask = mask, pairs.set_head(p, b, n), pairs.score = p.score<float>(b, n);
    return pairs;
  }

  // What operands add to the score of a pair that the mask keeps or not; -inf: the pair is removed.
  __device__ __forceinline__ float added(int i, int j, bool visible) const {
    return !visible ? -INFINITY : acts.bits ? addend.at(i, j) : 0.0f;
  }
};

// What a backward knows of a pair.
struct Pair {
  int at;  // of its element in panels
  int query, key;
  bool visible;
  float probability, factor;  // 0 where it is not visible; what dropout multiplies it by
  float d_score;              // of the score by the scaled product
  float distance;             // that a slope multiplies
};

// Calls body(r, c) for this thread's blocks of elements (r, r + 1) x (c, c + 1).
template <class Body>
__device__ __forceinline__ void each_block(const Body& body) {
#pragma unroll 1
  for (int block = 0; block < kRows * kCols / 4; block++) body(block / 2 * 2, block % 2 * 2);
}

// This thread's elements between registers and a panel.
__device__ __forceinline__ void store_elements(float* panel_s, const float (&x)[kRows][kCols], const Lane& lane) {
#pragma unroll
  for (int r = 0; r < kRows; r++) {
#pragma unroll
    for (int c = 0; c < kCols; c++) panel_s[lane.at(r, c)] = x[r][c];
  }
}
__device__ __forceinline__ void load_elements(float (&x)[kRows][kCols], const float* panel_s, const Lane& lane) {
#pragma unroll
  for (int r = 0; r < kRows; r++) {
#pragma unroll
    for (int c = 0; c < kCols; c++) x[r][c] = panel_s[lane.at(r, c)];
  }
}

}  // namespace jax_flash2::cuda::fma
