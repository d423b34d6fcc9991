// P and dS of the pairs that a lane holds, from their dot products, under whatever operands a call has. Knows no tile and no
// architecture.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "core/problem.h"
#include "cuda/operands.cuh"
#include "cuda/score.cuh"
#include "cuda/score_gradients.cuh"

namespace jax_flash2::cuda {

// What a backward knows of a batch row and a query head, see operands.cuh, and what it adds to.
struct BackwardOperands : Operands {
  ScoreGradients gradients;

  template <Body kBody>
  __device__ __forceinline__ void set_head(const Problem& p, const Batch& b, int n) {
    Operands::set_head<kBody>(p, b, n);
    if constexpr (kBody == Body::kGeneral) gradients = ScoreGradients::make(p, b, n);
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
    lines.all([&](int h, int x) { s(h, x) = score.apply<Math, false>(s(h, x)); });
    if (acts.bias()) lines.all([&](int h, int x) { s(h, x) += bias[h][x]; });
    if (acts.slope()) add_slope(lines, seen, s);
    lines.all([&](int h, int x) {
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
    const auto drop = [&](const auto& y) {
      if (dropout.present()) lines.all([&](int h, int x) { y(h, x) *= kept[h] >> x & 1 ? dropout.scale : 0.0f; });
    };
    const auto keep_seen = [&](const auto& y) {
      if (!lines.are_whole(seen)) lines.all([&](int h, int x) { y(h, x) = seen[h] >> x & 1 ? y(h, x) : 0.0f; });
    };
    const auto add_gradients = [&](const auto& ds) {
      if (!gradients.present()) return;
      float own[2][kPairs];
      uint32_t pairs[2] = {seen[0], seen[1]};
      lines.all([&](int h, int x) { own[h][x] = ds(h, x); });
      gradients.add(lines, pairs, own, *this, queries);
    };
    const auto to_ds = [&](int h, int x, float probability) {
      const float2 delta = deltas(x & ~1);
      return probability * (dp(h, x) - (x % 2 ? delta.y : delta.x));
    };
    drop(dp);
    if (score.softcap == 0) {
      lines.all([&](int h, int x) { dp(h, x) = to_ds(h, x, s(h, x)); });
      drop(s), keep_seen(s), keep_seen(dp), add_gradients(dp);
      return;
    }
    const Acts acts = this->acts;
    const auto to_p = [&](int h, int x, float capped, float added) {
      const float2 lse = lses(x & ~1);
      s(h, x) = power(capped + added + (x % 2 ? lse.y : lse.x));
    };
    if (!acts.ask() && !acts.slope()) {  // then nobody wants gradients
      lines.all([&](int h, int x) {
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
    lines.all([&](int h, int x) {
      const float capped = score.apply<Math, true>(s(h, x));
      to_p(h, x, capped, more[h][x]);
      more[h][x] = to_ds(h, x, s(h, x)), dp(h, x) = more[h][x] * score.slope<true>(capped);
    });
    drop(s), keep_seen(s), keep_seen(dp), keep_seen(more_at), add_gradients(more_at);
  }
};

}  // namespace jax_flash2::cuda
