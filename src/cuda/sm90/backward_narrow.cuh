// What a warpgroup of the backward computes of a narrow tile: whole rows of dK and dV of 64 keys, in registers.
//
// Scores are computed transposed (keys x queries), so that P and dS leave the tensor cores as the operands that dV = P
// dO and dK = dS Q want, in registers. Only dS, which dQ = dS^T K wants the other way round, goes through shared
// memory, and dQ, which leaves it as an addition to memory.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "core/problem.h"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/stmatrix.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/backward_plan.cuh"
#include "cuda/sm90/backward_rows.cuh"
#include "cuda/softmax.cuh"
#include "cuda/tile/accumulator.cuh"
#include "cuda/tile/fragment.cuh"
#include "cuda/tile/operand.cuh"
#include "cuda/tile/row_blocks.cuh"

namespace jax_flash2::cuda::sm90 {

template <class Config, class Element, bool kPlain>
__device__ __forceinline__ void compute_narrow(const Problem& p, const BackwardTensors& tensors,
                                               const BackwardSchedule& schedule, uint32_t block, uint32_t shared_,
                                               int group) {
  constexpr BackwardTile kTile = Config::kTile;
  constexpr int kKeys = kTile.keys(), kQueries = kTile.queries, kHeadDim = kTile.head_dim;
  constexpr int kCols8 = kQueries / 8, kOut8 = kHeadDim / 8;
  constexpr int kAllBarrier = 1, kGroupBarrier = 2;  // named; one of all who compute, one a warpgroup
  constexpr int kAll = 128 * kTile.kConsumers;
  using Shared = BackwardShared<Config>;
  using KTile = typename Shared::KTile;
  using QTile = typename Shared::QTile;
  using DsTile = typename Shared::DsTile;
  using OutTile = typename Shared::OutTile;
  using ptx::Major;

  const uint32_t thread_ = threadIdx.x % 128, thread = thread_, lane = thread % 32, shared = shared_;
  Ring<1> k_ring{shared + Shared::kKRing}, dq_ring{shared + Shared::kDqRing + group * Ring<1>::kBytes};
  Ring<Shared::kStages> q_ring{shared + Shared::kQRing};
  const auto dout_ring = [&] {  // goes round with the other
    return Ring<Shared::kStages>{q_ring.barriers + Shared::kDoutRing - Shared::kQRing, q_ring.stage, q_ring.parity};
  };
  const auto one_a_warp = [&](auto&& action) {
    if (lane == 0) action();
  };

  float dk[kOut8][4], dv[kOut8][4];
  bool leaving = false;  // dK and dV of the tile before are on their way out of the places of dQ and dS

  const int steps = schedule.steps(block);
#pragma unroll 1
  for (int list_step = 0; list_step < steps; list_step++) {
    KeyTile at{};
    if (!at.template find<kKeys, kQueries>(p, schedule, block, list_step)) continue;
    const int j0 = at.tile * kKeys;
    const Tiles tiles = at.tiles;
    if (tiles.begin >= tiles.end) {
      // Else the accumulators are clear.
      if (schedule.parts == 1) clear_keys<Element>(p, at, j0 + group * 64, kHeadDim);
      continue;
    }
    const Range live_q = at.mask.live_queries(), live_k = at.mask.live_keys();
    const Score<float> score = p.score<float>(at.b, at.n_begin);
    const float scale_log2 = score.scale * kLog2e;
#pragma unroll
    for (int x = 0; x < kOut8 * 4; x++) dk[x / 4][x % 4] = dv[x / 4][x % 4] = 0;

    const auto step = [&]<bool kMasked>(int n, int m) {
      // What follows from these is worked out in each step: kept, it would take more registers than there are.
      const uint32_t shared = forget(shared_), thread = forget(thread_), lane = thread % 32, warp = thread / 32;
      const tile::Operand<KTile, Major::kK> k_operand(shared + Shared::kK, group * 64);
      const tile::Operand<KTile, Major::kK> v_operand(shared + Shared::kV, group * 64);
      const tile::Operand<QTile, Major::kK> q_operand(shared + Shared::kQ), dout_operand(shared + Shared::kDout);
      const tile::Operand<QTile, Major::kMN> q_cols_operand(shared + Shared::kQ);
      const tile::Operand<QTile, Major::kMN> dout_cols_operand(shared + Shared::kDout);
      const tile::Operand<DsTile, Major::kK> ds_operand(shared + Shared::kDs, kTile.dq_by_rows() ? group * 64 : 0);
      const tile::Operand<KTile, Major::kMN> k_cols_operand(
          shared + Shared::kK + kTile.dq_first_col(group) / KTile::kPanelCols * KTile::kPanelBytes);
      const uint32_t ds_s =
          shared + Shared::kDs + DsTile::offset((lane >> 4) * 8 + (lane & 7), group * 8 + warp * 2 + (lane >> 3 & 1));
      const int lane_key = group * 64 + warp * 16 + lane / 4;  // of the tile; this lane's other key is 8 further on
      // This warp's rows of dQ, in the order of tile/row_blocks.cuh; each warpgroup's part alone, for the other's may
      // still be on its way out.
      const int dq_row = kTile.dq_by_rows() ? group * 64 + warp * 16 : warp * 16;
      const uint32_t dq_s =
          shared + Shared::kDq +
          (kTile.dq_by_rows() ? dq_row * p.D * 4
                              : group * 64 * Config::kTile.dq_cols(0) * 4 +
                                    dq_row * (group == 0 ? Config::kTile.dq_cols(0) : Config::kTile.dq_cols(1)) * 4);

      const int i0 = m * kQueries, j0 = forget(at.tile) * kKeys;
      const Mask mask = forget(at.mask);
      const Range live_q = mask.live_queries();
      const uint32_t q_stage = q_ring.stage * QTile::kBytes, ds_stage = q_ring.stage * DsTile::kBytes;
      const uint32_t statistics =
          shared + Shared::kStatistics + q_ring.stage * Shared::kStatisticsBytes + lane % 4 * 8;  // of column 2q
      float s[kCols8][4], dp[kCols8][4];

      q_ring.wait_full();
      if constexpr (kMasked)
        clear_dead_rows<QTile>(shared + Shared::kQ + q_stage, i0, p.T, live_q, kGroupBarrier + group);
      ptx::pin(s);
      ptx::wgmma_fence();
#pragma unroll
      for (int k = 0; k < kHeadDim / 16; k++) {
        ptx::Wgmma<Element, kQueries>::template ss<Major::kK>(s, k_operand.step(k), q_operand.step(k, q_stage), k > 0);
      }
      ptx::wgmma_commit_group();
      dout_ring().wait_full();
      if constexpr (kMasked)
        clear_dead_rows<QTile>(shared + Shared::kDout + q_stage, i0, p.T, live_q, kGroupBarrier + group);
      ptx::pin(dp);
      ptx::wgmma_fence();
#pragma unroll
      for (int k = 0; k < kHeadDim / 16; k++) {
        ptx::Wgmma<Element, kQueries>::template ss<Major::kK>(dp, v_operand.step(k), dout_operand.step(k, q_stage),
                                                              k > 0);
      }
      ptx::wgmma_commit_group();
      ptx::wgmma_wait_group<1>();
      ptx::pin(s);

      const Keep keep = p.keep(at.b, n);
      const DScore dscore = p.dscore(at.b, n);
      // Which of this lane's queries, 0 1 8 9 16 17 .. from column 2q on, see its keys: a bit each.
      uint32_t seen[2] = {~0u, ~0u};
      if constexpr (kMasked) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
          seen[h] = column_bits(mask.queries(j0 + lane_key + 8 * h), i0 + int(lane) % 4 * 2);
        }
      }
      const auto is_seen = [&](int j, int e) { return !kMasked || (seen[e / 2] >> (2 * j + e % 2) & 1); };
      // P from scores; in the general body scores from products, for dS asks for them.
#pragma unroll
      for (int j = 0; j < kCols8; j++) {
        if constexpr (kPlain) {
          const float2 lse = ptx::ld_shared_v2_f32(statistics + j * 32);  // negative, log2
#pragma unroll
          for (int e = 0; e < 4; e++) {
            s[j][e] = ptx::ex2(fmaf(s[j][e], scale_log2, e % 2 ? lse.y : lse.x));
            if (!is_seen(j, e)) s[j][e] = 0;
          }
        } else {
#pragma unroll
          for (int e = 0; e < 4; e++) {
            const int row = i0 + lane % 4 * 2 + 8 * j + e % 2, key = j0 + lane_key + e / 2 * 8;
            s[j][e] = score.apply<Math>(s[j][e], row, key);
          }
        }
      }
      uint32_t p_r[kCols8 / 2][4], ds_r[kCols8 / 2][4];
      if constexpr (kPlain) {
#pragma unroll
        for (int c = 0; c < kCols8 / 2; c++) tile::convert_c_to_a<Element>(p_r[c], s[2 * c], s[2 * c + 1]);
      }
      ptx::wgmma_wait_group<0>();
      ptx::pin(dp);
#pragma unroll
      for (int j = 0; j < kCols8; j++) {
        const float2 delta = ptx::ld_shared_v2_f32(statistics + kQueries * 4 + j * 32);
        if constexpr (kPlain) {
#pragma unroll
          for (int e = 0; e < 4; e++) {
            dp[j][e] = s[j][e] * (dp[j][e] - (e % 2 ? delta.y : delta.x));
            if (!is_seen(j, e)) dp[j][e] = 0;
          }
        } else {
          const float2 lse = ptx::ld_shared_v2_f32(statistics + j * 32);
#pragma unroll
          for (int e = 0; e < 4; e++) {
            const int row = i0 + lane % 4 * 2 + 8 * j + e % 2, key = j0 + lane_key + e / 2 * 8;
            const float x = s[j][e], kept = keep.factor(row, key);
            const float probability = ptx::ex2(fmaf(x, kLog2e, e % 2 ? lse.y : lse.x));
            const float ds = probability * (dp[j][e] * kept - (e % 2 ? delta.y : delta.x));
            s[j][e] = is_seen(j, e) ? probability * kept : 0.0f;
            dp[j][e] = is_seen(j, e) ? ds * score.slope(x) : 0.0f;
            if (is_seen(j, e)) dscore(row, key, ds);
          }
        }
      }
#pragma unroll
      for (int c = 0; c < kCols8 / 2; c++) {
        if constexpr (!kPlain) tile::convert_c_to_a<Element>(p_r[c], s[2 * c], s[2 * c + 1]);
        tile::convert_c_to_a<Element>(ds_r[c], dp[2 * c], dp[2 * c + 1]);
      }

      ptx::pin(dv), ptx::pin(p_r);
      ptx::wgmma_fence();
#pragma unroll
      for (int c = 0; c < kQueries / 16; c++) {
        ptx::Wgmma<Element, kHeadDim>::template rs<Major::kMN>(dv, p_r[c], dout_cols_operand.step(c, q_stage), 1);
      }
      ptx::wgmma_commit_group();
      if (leaving) {
        if (thread == 0) ptx::cp_async_bulk_wait_group_read<0>();
        ptx::bar_sync(kAllBarrier, kAll);
        leaving = false;
      }
#pragma unroll
      for (int c = 0; c < kCols8 / 2; c++) {
        ptx::stmatrix_x4_trans(DsTile::advance(ds_s + ds_stage, c, 0), ds_r[c][0], ds_r[c][1], ds_r[c][2], ds_r[c][3]);
      }
      ptx::fence_proxy_async();
      ptx::bar_sync(kAllBarrier, kAll);  // dS of all keys is there

      const auto rest = [&]<int kDqCols>() {
        float dq[kDqCols / 8][4];
        ptx::pin(dq);
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < kKeys / 16; k++) {
          ptx::Wgmma<Element, kDqCols>::template ss<Major::kMN>(dq, ds_operand.step(k, ds_stage),
                                                                k_cols_operand.step(k), k > 0);
        }
        ptx::wgmma_commit_group();
        ptx::wgmma_wait_group<1>();
        ptx::pin(dv), ptx::pin(p_r);
        one_a_warp([&] { dout_ring().release(); });
        ptx::pin(dk), ptx::pin(ds_r);
        ptx::wgmma_fence();
#pragma unroll
        for (int c = 0; c < kQueries / 16; c++) {
          ptx::Wgmma<Element, kHeadDim>::template rs<Major::kMN>(dk, ds_r[c], q_cols_operand.step(c, q_stage), 1);
        }
        ptx::wgmma_commit_group();
        ptx::wgmma_wait_group<1>();
        ptx::pin(dq);
        dq_ring.wait_empty();
        if (i0 + dq_row + tile::RowBlocks::kRows <= p.T) {
#pragma unroll
          for (int j = 0; j < kDqCols / 8; j++) {
            if (kTile.dq_first_col(group) + 8 * j < p.D) ptx::st_shared_v4_f32(dq_s + lane * 16 + j * 512, dq[j]);
          }
        } else {
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const int row = int(lane) / 4 + 8 * h;
            if (i0 + dq_row + row >= p.T) continue;
            const uint32_t at = dq_s + (row * (kTile.dq_by_rows() ? p.D : kDqCols) + int(lane) % 4 * 2) * 4;
#pragma unroll
            for (int j = 0; j < kDqCols / 8; j++) {
              if (kTile.dq_first_col(group) + 8 * j >= p.D) continue;
              ptx::st_shared_f32(at + j * 32, dq[j][2 * h]), ptx::st_shared_f32(at + j * 32 + 4, dq[j][2 * h + 1]);
            }
          }
        }
        ptx::fence_proxy_async();  // what was written, to the copy engine
        __syncwarp();
        one_a_warp([&] { ptx::mbarrier_arrive(dq_ring.full()); });
        dq_ring.next();
        ptx::wgmma_wait_group<0>();
        ptx::pin(dk), ptx::pin(ds_r);
        one_a_warp([&] { q_ring.release(); });
        q_ring.next();
      };
      if constexpr (Config::kTile.dq_cols(0) == Config::kTile.dq_cols(1)) {
        rest.template operator()<Config::kTile.dq_cols(0)>();
      } else if (group == 0) {
        rest.template operator()<Config::kTile.dq_cols(0)>();
      } else {
        rest.template operator()<Config::kTile.dq_cols(1)>();
      }
    };

    // A tile with dead queries is done as a masked one, which clears them.
    const int full_begin = clamp_((live_q.begin + kQueries - 1) / kQueries, tiles.full_begin, tiles.full_end);
    const int full_end = live_q.end == p.T ? tiles.full_end : clamp_(live_q.end / kQueries, full_begin, tiles.full_end);

    k_ring.wait_full();
    clear_dead_rows<KTile>(shared + Shared::kK, j0, p.S, live_k, kGroupBarrier + group);
#pragma unroll 1
    for (int n = at.n_begin; n < at.n_end; n++) {
      int m = tiles.begin;
      if constexpr (kPlain) {
#pragma unroll 1
        for (; m < full_begin; m++) step.template operator()<true>(n, m);
#pragma unroll 1
        for (; m < full_end; m++) step.template operator()<false>(n, m);
      }
#pragma unroll 1
      for (; m < tiles.end; m++) step.template operator()<true>(n, m);
    }
    one_a_warp([&] { k_ring.release(); });
    k_ring.next();

    at.template find<kKeys, kQueries>(p, schedule, block, forget(list_step));  // not kept through the loops
    const uint32_t warp = forget(thread_) / 32;
    const int key0 = at.tile * kKeys;
    if (schedule.parts > 1) {
      const int row0 = key0 + group * 64 + warp * 16;
      const auto add = [&](const float (&x)[kOut8][4], float* to) {
        tile::add_fragments<false, 1>(reinterpret_cast<const float (&)[1][kOut8][4]>(x), to, {p.S, p.D}, row0, 0);
      };
      add(dk, p.dk_acc.at<float>(at.b, at.k_head));
      add(dv, p.dv_acc.at<float>(at.b, at.k_head));
      continue;
    }
    // Out through the places of dQ and dS; the tensor maps keep rows and columns past the tensors from being written.
    for (int g = 0; g < kTile.kConsumers; g++) {  // all of dQ has left
      Ring<1>{shared + Shared::kDqRing + g * Ring<1>::kBytes, 0, dq_ring.parity}.wait_empty();
    }
    ptx::bar_sync(kAllBarrier, kAll);  // and nobody reads dS
    const int lane_key = key0 + group * 64 + warp * 16 + lane / 4;
    const Range live_keys = at.mask.live_keys();
    const bool live[2] = {live_keys.has(lane_key), live_keys.has(lane_key + 8)};  // else not even 0 times a NaN
    const auto stage = [&](const float (&x)[kOut8][4], uint32_t tile, float scale) {
      const uint32_t lane_s = tile + OutTile::offset(warp * 16 + lane % 16, lane / 16);
      const auto pair = [&](int j, int h) {
        return live[h] ? ptx::cvt_x2<Element>(x[j][2 * h] * scale, x[j][2 * h + 1] * scale) : 0u;
      };
#pragma unroll
      for (int c = 0; c < kHeadDim / 16; c++) {
        ptx::stmatrix_x4(OutTile::advance(lane_s, 0, c), pair(2 * c, 0), pair(2 * c, 1), pair(2 * c + 1, 0),
                         pair(2 * c + 1, 1));
      }
    };
    const uint32_t dv_s = shared + Shared::kDvOut + group * OutTile::kBytes;
    const uint32_t dk_s = shared + Shared::kDkOut + group * OutTile::kBytes;
    stage(dv, dv_s, 1.0f);
    stage(dk, dk_s, p.score<float>(at.b, at.n_begin).scale);
    ptx::fence_proxy_async();
    ptx::bar_sync(kGroupBarrier + group, 128);
    if (thread == 0) {
      const int row = key0 + group * 64;
#pragma unroll
      for (int panel = 0; panel < OutTile::kPanels; panel++) {
        const int col = panel * OutTile::kPanelCols, offset = panel * OutTile::kPanelBytes;
        ptx::cp_async_bulk_tensor_4d_store(&tensors.dv.map, col, row, at.k_head, tensors.dv.batch(at.b), dv_s + offset);
        ptx::cp_async_bulk_tensor_4d_store(&tensors.dk.map, col, row, at.k_head, tensors.dk.batch(at.b), dk_s + offset);
      }
      ptx::cp_async_bulk_commit_group();
    }
    leaving = true;
  }
  if (thread == 0) ptx::cp_async_bulk_wait_group<0>();  // shared memory is read until then
}

}  // namespace jax_flash2::cuda::sm90
