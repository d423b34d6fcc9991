// The gradients of the bias and of the ALiBi slopes: what d loss / d score of a pair adds to its elements, which heads, batch
// rows, queries or keys may share. Knows no tile and no architecture.
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

  // Adds the gradients ds[h][x] of lines' scores, of the pairs that `pairs` names, all others being 0. By whole warps: the
  // lanes that share queries are those of equal lane % 4. queries: that exist.
  template <int kPairs>
  __device__ __noinline__ void add(Lines<false, kPairs> lines, const uint32_t (&pairs)[2], const float (&ds)[2][kPairs],
                                   const Operands& operands, int queries) const {
    if (bias_g) {
      float* const first = bias_g + lines.i * bias_row + lines.j * bias_col;
#pragma unroll
      for (int h = 0; h < 2; h++) {
#pragma unroll
        for (int x = 0; x < kPairs; x++) {
          float* const to = first + tile::column_step(x) * bias_row + 8 * h * bias_col;
          if (pairs[h] >> x & 1 && bias_shared) atomicAdd(to, ds[h][x]);
          if (pairs[h] >> x & 1 && !bias_shared) *to = ds[h][x];  // this pair's own
        }
      }
    }
    if (!slopes_g) return;
    float shares[kPairs] = {};
    operands.with_distances(lines, pairs, [&](int h, int x, float distance) { shares[x] -= ds[h][x] * distance; });
#pragma unroll
    for (int x = 0; x < kPairs; x++) {
      float share = shares[x];
      share += __shfl_xor_sync(~0u, share, 4);
      share += __shfl_xor_sync(~0u, share, 8);
      share += __shfl_xor_sync(~0u, share, 16);
      const int i = lines.query(0, x);
      if (threadIdx.x % 32 < 4 && i < queries) atomicAdd(slopes_g + i * slopes_row, share);
    }
  }
};

// Zeroes what pairs are added to.
inline Status clear_score_gradients(const Problem& p, cudaStream_t stream) {
  const int bytes = p.dtype == DType::kF64 ? sizeof(double) : sizeof(float);
  const auto clear = [&](const Tensor& t, int64_t elements) {
    return !t.present() || elements == 0 || cudaMemsetAsync(t.data, 0, elements * bytes, stream) == cudaSuccess;
  };
  const Tensor& bias = p.grads.bias;
  int64_t own = (bias.head ? p.N : 1) * int64_t{bias.row ? p.T : 1} * (bias.col ? p.S : 1);
  for (int a = 0; a < kMaxBatchAxes; a++) own *= bias.batch[a] ? p.batch_sizes[a] : 1;
  const bool ok = clear(bias, own) && clear(p.grads.alibi_slopes, int64_t{p.B} * p.N * p.T);
  return {ok ? nullptr : "clearing the gradients of the bias and of the slopes failed"};
}

}  // namespace jax_flash2::cuda
