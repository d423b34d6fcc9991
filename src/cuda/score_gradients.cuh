// What a backward does with d loss / d score of a pair beside dQ and dK: adds it to the gradients of the bias and of the
// ALiBi slopes. Elements may be shared by heads, batch rows, queries or keys. Knows no tile and no architecture.
#pragma once
#include <cuda_runtime.h>

#include "core/problem.h"
#include "cuda/operands.cuh"
#include "cuda/score.cuh"

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

// What a backward knows of a batch row and a query head, see operands.cuh, and what it adds to.
struct BackwardOperands : Operands {
  ScoreGradients gradients;

  __device__ __forceinline__ void set_head(const Problem& p, const Batch& b, int n) {
    Operands::set_head(p, b, n), gradients = ScoreGradients::make(p, b, n);
  }

  // Both turn what a lane has of lines step by step into P and dS. `seen` names the pairs that the mask leaves, and then
  // those that operands do. Of the pairs x and x + 1 lses(x) is -lse, and deltas(x) delta; power(y) is e^y.

  // Before dP is known: s(h, x) from dot products to probabilities before dropout. Not where scores are capped: dS asks for
  // scores then. bias: what `ask` has said.
  template <int kPairs, class Power, class Lse, class S>
  __device__ __forceinline__ void probabilities(const Lines<false, kPairs>& lines, const uint32_t (&seen)[2],
                                                const float (&bias)[2][kPairs], const Score<float>& score,
                                                const Power& power, const Lse& lses, const S& s) const {
    if (score.softcap != 0) return;
    const Acts acts = this->acts;
    const auto all = [&](const auto& act) {
#pragma unroll
      for (int x = 0; x < 2 * kPairs; x++) act(x / kPairs, x % kPairs);
    };
    all([&](int h, int x) { s(h, x) = score.apply<Math, false>(s(h, x)); });
    if (acts.bias()) all([&](int h, int x) { s(h, x) += bias[h][x]; });
    if (acts.slope()) add_slope(lines, seen, s);
    all([&](int h, int x) {
      const float2 lse = lses(x & ~1);
      s(h, x) = power(s(h, x) + (x % 2 ? lse.y : lse.x));
    });
  }

  // Then s(h, x) to P, and dp(h, x) from dP to dS. `kept` names what dropout keeps; queries: that exist.
  template <int kPairs, class Power, class Lse, class Delta, class S, class Dp>
  __device__ __forceinline__ void differentiate(const Lines<false, kPairs>& lines, uint32_t (&seen)[2],
                                                const uint32_t (&kept)[2], int queries, const Score<float>& score,
                                                const Power& power, const Lse& lses, const Delta& deltas, const S& s,
                                                const Dp& dp) const {
    const auto all = [&](const auto& act) {
#pragma unroll
      for (int x = 0; x < 2 * kPairs; x++) act(x / kPairs, x % kPairs);
    };
    const auto drop = [&](const auto& y) {
      if (dropout.present()) all([&](int h, int x) { y(h, x) *= kept[h] >> x & 1 ? dropout.scale : 0.0f; });
    };
    const auto keep_seen = [&](const auto& y) {
      if (!lines.are_whole(seen)) all([&](int h, int x) { y(h, x) = seen[h] >> x & 1 ? y(h, x) : 0.0f; });
    };
    const auto add_gradients = [&](const auto& ds) {
      if (!gradients.present()) return;
      float own[2][kPairs];
      uint32_t pairs[2] = {seen[0], seen[1]};
      all([&](int h, int x) { own[h][x] = ds(h, x); });
      gradients.add(lines, pairs, own, *this, queries);
    };
    const auto to_ds = [&](int h, int x, float probability) {
      const float2 delta = deltas(x & ~1);
      return probability * (dp(h, x) - (x % 2 ? delta.y : delta.x));
    };
    drop(dp);
    if (score.softcap == 0) {
      all([&](int h, int x) { dp(h, x) = to_ds(h, x, s(h, x)); });
      drop(s), keep_seen(s), keep_seen(dp), add_gradients(dp);
      return;
    }
    const Acts acts = this->acts;
    const auto to_p = [&](int h, int x, float capped, float added) {
      const float2 lse = lses(x & ~1);
      s(h, x) = power(capped + added + (x % 2 ? lse.y : lse.x));
    };
    if (!acts.ask() && !acts.slope()) {  // then nobody wants gradients
      all([&](int h, int x) {
        const float capped = score.apply<Math, true>(s(h, x));
        to_p(h, x, capped, 0);
        dp(h, x) = to_ds(h, x, s(h, x)) * score.slope<true>(capped);
      });
      drop(s), keep_seen(s), keep_seen(dp);
      return;
    }
    float more[2][kPairs] = {};  // in local memory: what operands add, then the gradient of the sum
    const auto more_at = [&](int h, int x) -> float& { return more[h][x]; };
    if (acts.ask()) call_ask(lines, seen, more);
    if (acts.slope()) add_slope(lines, seen, more_at);
    all([&](int h, int x) {
      const float capped = score.apply<Math, true>(s(h, x));
      to_p(h, x, capped, more[h][x]);
      more[h][x] = to_ds(h, x, s(h, x)), dp(h, x) = more[h][x] * score.slope<true>(capped);
    });
    drop(s), keep_seen(s), keep_seen(dp), keep_seen(more_at), add_gradients(more_at);
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
