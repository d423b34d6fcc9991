// What a backward does with d loss / d score of a pair beside dQ and dK: adds it to the gradients of the bias and of the
// ALiBi slopes. Elements may be shared by heads, batch rows, queries or keys. Knows no tile and no architecture.
#pragma once
#include <cuda_runtime.h>

#include "core/problem.h"
#include "cuda/operands.cuh"

namespace jax_flash2::cuda {

// Of one (batch row, query head).
struct ScoreGradients {
  float* bias_g;  // null: none
  int64_t bias_row, bias_col;
  bool bias_shared;
  float* slopes_g;  // [T], null: none
  int64_t slopes_row;

  static __device__ __forceinline__ ScoreGradients make(const Problem& p, const Batch& b, int n) {
    const Tensor &bias = p.grads.bias, &slopes = p.grads.alibi_slopes;
    return {bias.present() ? bias.at<float>(b, n) : nullptr,     bias.row,  bias.col, p.bias_is_shared(),
            slopes.present() ? slopes.at<float>(b, n) : nullptr, slopes.row};
  }

  __device__ __forceinline__ bool present() const { return bias_g || slopes_g; }

  __device__ __forceinline__ void add_bias(int i, int j, float ds) const {
    if (!bias_g) return;
    float* const to = bias_g + i * bias_row + j * bias_col;
    if (bias_shared) {
      atomicAdd(to, ds);
    } else {
      *to = ds;  // this pair's own
    }
  }

  // A lane's share of query i's sum; the lanes that share a query are those of equal lane % 4.
  __device__ __forceinline__ void add_slope(int i, bool exists, float share) const {
    if (!slopes_g) return;
    share += __shfl_xor_sync(~0u, share, 4);
    share += __shfl_xor_sync(~0u, share, 8);
    share += __shfl_xor_sync(~0u, share, 16);
    if (threadIdx.x % 32 < 4 && exists) atomicAdd(slopes_g + i * slopes_row, share);
  }
};

// What a backward knows of a batch row and a query head, see operands.cuh, and what it adds to.
struct BackwardOperands : Operands {
  ScoreGradients gradients;

  __device__ __forceinline__ void set_head(const Problem& p, const Batch& b, int n) {
    Operands::set_head(p, b, n), gradients = ScoreGradients::make(p, b, n);
  }

  // Of a pair whose score's gradient is `ds`: adds it to the bias's, and returns what it adds to the slope's.
  __device__ __noinline__ float add(int i, int j, float ds) const {
    gradients.add_bias(i, j, ds);
    return gradients.slopes_g ? -ds * addend.distance(i, j) : 0.0f;
  }
};

// Zeroes what pairs are added to.
inline Status clear_score_gradients(const Problem& p, cudaStream_t stream) {
  const auto clear = [&](const Tensor& t, int64_t elements) {
    return !t.present() || elements == 0 || cudaMemsetAsync(t.data, 0, elements * sizeof(float), stream) == cudaSuccess;
  };
  const Tensor& bias = p.grads.bias;
  int64_t own = (bias.head ? p.N : 1) * int64_t{bias.row ? p.T : 1} * (bias.col ? p.S : 1);
  for (int a = 0; a < kMaxBatchAxes; a++) own *= bias.batch[a] ? p.batch_sizes[a] : 1;
  const bool ok = clear(bias, own) && clear(p.grads.alibi_slopes, int64_t{p.B} * p.N * p.T);
  return {ok ? nullptr : "clearing the gradients of the bias and of the slopes failed"};
}

}  // namespace jax_flash2::cuda
