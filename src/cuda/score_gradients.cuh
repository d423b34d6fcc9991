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

  __device__ __forceinline__ void add_bias(int i, int j, float ds) const {
    if (!bias_g) return;
    float* const to = bias_g + i * bias_row + j * bias_col;
    if (bias_shared) {
      atomicAdd(to, ds);
    } else {
      *to = ds;  // this pair's own
    }
  }

  __device__ __forceinline__ bool present() const { return bias_g || slopes_g; }

  // Adds the gradients `ds` of a line's scores, of the pairs that `pairs` names, all others being 0. By whole warps: the
  // lanes that share queries are those of equal lane % 4. queries: that exist.
  template <int kPairs>
  __device__ __noinline__ void add(Line<false, kPairs> line, uint32_t pairs, const float* ds,
                                   const Addend<float>& addend, int queries) const {
    if (bias_g) {
#pragma unroll
      for (int x = 0; x < kPairs; x++) {
        float* const to = bias_g + line.place(x, bias_row, bias_col);
        if (pairs >> x & 1 && bias_shared) atomicAdd(to, ds[x]);
        if (pairs >> x & 1 && !bias_shared) *to = ds[x];  // this pair's own
      }
    }
    if (!slopes_g) return;
    float distance[kPairs];
    find_distances(addend, line, pairs, distance);
#pragma unroll
    for (int x = 0; x < kPairs; x++) {
      float share = -ds[x] * distance[x];
      share += __shfl_xor_sync(~0u, share, 4);
      share += __shfl_xor_sync(~0u, share, 8);
      share += __shfl_xor_sync(~0u, share, 16);
      if (threadIdx.x % 32 < 4 && line.query(x) < queries) atomicAdd(slopes_g + line.query(x) * slopes_row, share);
    }
  }
};

// What a backward knows of a batch row and a query head, see operands.cuh, and what it adds to.
struct BackwardOperands : Operands {
  ScoreGradients gradients;

  __device__ __forceinline__ void set_head(const Problem& p, const Batch& b, int n) {
    Operands::set_head(p, b, n), gradients = ScoreGradients::make(p, b, n);
  }

  // Of a line of pairs, of which `seen` names those that the mask leaves and `kept` those that dropout does: turns scores
  // s(x) into probabilities, and dP into dS. power(score, x) is a probability before dropout; queries: that exist.
  template <int kPairs, class Power, class Delta, class S, class Dp>
  __device__ __forceinline__ void differentiate(const Line<false, kPairs>& line, uint32_t seen, uint32_t kept,
                                                int queries, const Score<float>& score, const Power& power,
                                                const Delta& delta, const S& s, const Dp& dp) const {
    float sums[kPairs] = {};  // what operands add, then the gradient of the sum
    if (adds) seen = sum(line, seen, sums);
    const float scale = dropout.present() ? dropout.scale : 1.0f;
#pragma unroll
    for (int x = 0; x < kPairs; x++) {
      const float qk = s(x), factor = kept >> x & 1 ? scale : 0.0f;
      const float probability = power(qk + sums[x], x), ds = probability * (dp(x) * factor - delta(x));
      const bool left = seen >> x & 1;
      s(x) = left ? probability * factor : 0.0f;
      dp(x) = left ? ds * score.slope(qk) : 0.0f;
      sums[x] = left ? ds : 0.0f;
    }
    if (gradients.present()) gradients.add(line, seen, sums, addend, queries);
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
