// The forward pass in float32 and float64, by FMAs on every device from compute capability 8.0 up: a block owns as many
// queries of one head as a panel has rows and walks the key tiles that its mask leaves, from the last to the first. Scores
// and the unscaled output stay in registers; P goes through shared memory, inside a warp. Asks Mask, Score, Addend and
// Dropout, and never knows which feature it serves.
#pragma once
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "core/problem.h"
#include "cuda/fma/config.cuh"
#include "cuda/fma/pairs.cuh"
#include "cuda/fma/panel.cuh"
#include "cuda/launch_kernel.cuh"
#include "cuda/opaque.cuh"

namespace jax_flash2::cuda::fma {

template <class Real, int kHeadDim>
__global__ void __launch_bounds__(kThreads, ForwardConfig<Real, kHeadDim>::kBlocksPerSm)
    forward_kernel(const __grid_constant__ Problem p, const int tiles, const Body body) {
  using Config = ForwardConfig<Real, kHeadDim>;
  constexpr int kSide = Panel<Real>::kSide, kPanel = Panel<Real>::kSize, kChunk = Panel<Real>::kChunk;
  constexpr int kRows = Panel<Real>::kRows, kCols = Panel<Real>::kCols;
  constexpr Real kLowest = std::numeric_limits<Real>::lowest();  // finite, so -inf - it is -inf
  extern __shared__ __align__(1024) char shared[];
  Real* const q_s = reinterpret_cast<Real*>(shared);
  Real *const kv_s = q_s + Config::kPanels * kPanel, *const p_s = kv_s + Config::kSlots * kPanel;
  Plan<Real>* const plan_s = reinterpret_cast<Plan<Real>*>(p_s + kPanel);

  const int head = blockIdx.x / tiles;
  const int i0 = (tiles - 1 - int(blockIdx.x) % tiles) * kSide;  // the last queries see most keys under a causal mask
  // Worked out anew wherever they are asked for: registers are full.
  const auto batch_row = [&] { return p.batch(opaque(head) / p.N); };
  const auto query_head = [&] { return opaque(head) % p.N; };
  const Mask mask = p.mask(batch_row());
  const auto live_k = mask.live_keys();
  const Tiles keys = mask.key_tiles(i0, min_(i0 + kSide, p.T), kSide);
  const Lane<Real> lane;

  const int k_panels = (p.D + kSide - 1) / kSide, v_panels = (p.Dv + kSide - 1) / kSide;

  // The stream of panels: of each key tile those of K, then those of V.
  int slot = 0;
  const auto load = [&](int kv_tile, int x) {
    return [&, kv_tile, x](int to) {
      const bool last = x == k_panels + v_panels;
      const int tile = last ? kv_tile - 1 : kv_tile, panel = last ? 0 : opaque(x);
      if (tile < keys.begin) return;
      const bool of_k = panel < k_panels;
      const Matrix<Real> from{of_k ? plan_s->k_g : plan_s->v_g, of_k ? p.k.row : p.v.row, of_k ? p.D : p.Dv};
      load_panel(kv_s + to * kPanel, from, tile * kSide, (of_k ? panel : panel - k_panels) * kSide, live_k);
      ptx::cp_async_commit_group();
    };
  };
  if (keys.begin < keys.end) {
    if (threadIdx.x == 0) {
      const int k_head = query_head() / p.group();
      plan_s->k_g = p.k.at<const Real>(batch_row(), k_head), plan_s->v_g = p.v.at<const Real>(batch_row(), k_head);
      plan_s->full_begin = keys.full_begin, plan_s->full_end = keys.full_end;
      plan_s->plain = body != Body::kGeneral && mask.exact;
    }
    __syncthreads();  // the plan is there
    const Matrix<Real> q{p.q.at<const Real>(batch_row(), query_head()), p.q.row, p.D};
    for (int x = 0; x < k_panels; x++) load_panel(q_s + x * kPanel, q, i0, x * kSide, mask.live_queries());
    load(keys.end - 1, 0)(slot);
  }

  Real out[Config::kPanels][kRows][kCols] = {};
  Real top[kRows], sum[kRows] = {};  // of a row's scores; this lane's share of the powers
#pragma unroll
  for (int r = 0; r < kRows; r++) top[r] = kLowest;

#pragma unroll 1
  for (int kv_tile = keys.end - 1; kv_tile >= keys.begin; kv_tile--) {
    const int j0 = kv_tile * kSide;
    Elements<Real> s = {};
#pragma unroll 1
    for (int x = 0; x < k_panels; x++) {
      step<Config::kSlots>(
          slot,
          [&](int at) { multiply_abt(s, q_s + x * kPanel, kv_s + at * kPanel, min_(kSide, p.D - x * kSide), lane); },
          load(kv_tile, x + 1));
    }

    if (plan_s->plain) {
      const Real scale = Real(p.spec.scale);
#pragma unroll
      for (int r = 0; r < kRows; r++) {
#pragma unroll
        for (int c = 0; c < kCols; c++) s[r][c] *= scale;
      }
      if (kv_tile < plan_s->full_begin || kv_tile >= plan_s->full_end) {
        const Mask anew = p.mask(batch_row());
#pragma unroll
        for (int r = 0; r < kRows; r++) {
          const Range seen = anew.keys(i0 + lane.row(r));
#pragma unroll
          for (int c = 0; c < kCols; c++) {
            if (!seen.has(j0 + lane.col(c))) s[r][c] = -INFINITY;
          }
        }
      }
    } else {
      const Mask mask = p.mask(batch_row());
      const Pairs pairs = Pairs<Real>::make(p, batch_row(), query_head(), mask);
      store_elements(p_s, s, lane);
      each_block<Real>([&](int r, int c) {
        const Range seen[] = {mask.keys(i0 + lane.row(r)), mask.keys(i0 + lane.row(r + 1))};
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const int i = i0 + lane.row(r + e / 2), j = j0 + lane.col(c + e % 2);
          Real& x = p_s[lane.at(r + e / 2, c + e % 2)];
          const Real added = pairs.added(i, j, seen[e / 2].has(j));
          // Selected, not added: a NaN of a key that the row does not see.
          x = added == -INFINITY ? added : pairs.score.template apply<Math>(x) + added;
        }
      });
      load_elements(s, p_s, lane);
    }

#pragma unroll
    for (int r = 0; r < kRows; r++) {
      Real now = top[r];
#pragma unroll
      for (int c = 0; c < kCols; c++) now = fmax(now, s[r][c]);
      now = row_max(now);
      const Real factor = power(top[r] - now);
      top[r] = now, sum[r] *= factor;
#pragma unroll
      for (int c = 0; c < kCols; c++) s[r][c] = power(s[r][c] - now), sum[r] += s[r][c];
#pragma unroll
      for (int x = 0; x < Config::kPanels; x++) {
#pragma unroll
        for (int c = 0; c < kCols; c++) out[x][r][c] *= factor;
      }
    }
    store_elements(p_s, s, lane);
    if (!plan_s->plain) {
      const auto dropout = p.dropout<Real>(batch_row(), query_head());
      if (dropout.present()) {
        each_block<Real>([&](int r, int c) {
          const uint32_t kept = dropout.kept(i0 + lane.row(r), j0 + lane.col(c));
#pragma unroll
          for (int e = 0; e < 4; e++) p_s[lane.at(r + e / 2, c + e % 2)] *= kept >> e & 1 ? dropout.scale : Real(0);
        });
      }
    }
    __syncwarp();  // P of this warp's rows is there; it is written again behind the barriers of the next tile

#pragma unroll
    for (int x = 0; x < Config::kPanels; x++) {
      if (x >= v_panels) break;
      step<Config::kSlots>(
          slot, [&](int at) { multiply_ab(out[x], p_s, kv_s + at * kPanel, lane); }, load(kv_tile, k_panels + x + 1));
    }
  }

  const Batch b = batch_row();
  const int n = query_head();
  Real* const out_g = p.out.at<Real>(b, n);
  Real* const lse_g = p.lse.at<Real>(b, n);
#pragma unroll
  for (int r = 0; r < kRows; r++) {
    const int i = i0 + lane.row(r);
    Real total = row_sum(sum[r]), factor = 1, reference = top[r];
    const bool reads = p.mask(b).live_queries().has(i) && total != 0;  // not `> 0`: a NaN goes on
    if (!reads) total = 0, reference = kLowest;  // a tile that is full for its live rows gave this one keys too
    const Real sink = i < p.mask(b).q_len ? p.sink<Real>(b, n) : Real(-INFINITY);
    if (sink != -INFINITY) {  // one more key, without a value
      const Real now = fmax(reference, sink);
      factor = exp(reference - now);
      total = total * factor + exp(sink - now), reference = now;
    }
    factor /= total;
    if (lane.tx == 0 && i < p.T) lse_g[i * p.lse.row] = total == 0 ? Real(-INFINITY) : reference + log(total);
#pragma unroll
    for (int x = 0; x < Config::kPanels; x++) {
      const int col = x * kSide + lane.tx * kChunk;
      Chunk<Real> scaled;
#pragma unroll
      for (int c = 0; c < kCols; c++) scaled.x[c] = out[x][r][c] * factor;
      // Not 0 times a NaN that other rows may read.
      if (i < p.T && col < p.Dv) store_chunk(out_g + i * p.out.row + col, reads ? scaled : Chunk<Real>{});
    }
  }
}

// The entry point that generated units instantiate: heads of up to kHeadDim columns, and as many of values.
template <class Element, int kHeadDim, int kValueDim>
Status forward(const Problem& p, cudaStream_t stream) {
  static_assert(std::is_floating_point_v<Element> && kValueDim == kHeadDim);
  if (p.B == 0 || p.N == 0 || p.T == 0) return {};
  constexpr int kSide = Panel<Element>::kSide;
  const int tiles = (p.T + kSide - 1) / kSide;
  return launch_kernel(forward_kernel<Element, kHeadDim>, int64_t{p.B} * p.N * tiles, kThreads,
                       ForwardConfig<Element, kHeadDim>::kSharedBytes, stream, p, tiles, p.body());
}

}  // namespace jax_flash2::cuda::fma
