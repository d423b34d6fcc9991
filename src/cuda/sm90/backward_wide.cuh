// What a warpgroup of the backward computes of a wide tile: half of the columns of dK and dV of 64 keys, in registers.
//
// Each warpgroup works out S and dP of half of a step's queries, transposed (keys x queries), and leaves P and dS in
// shared memory for both. dS is there twice: as dK = dS^T Q wants it, and as dQ = dS K does. A part of dQ that has no
// room in shared memory waits in registers for the next step's products, under which it leaves.
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
__device__ __forceinline__ void compute_wide(const Problem& p, const BackwardTensors& tensors,
                                             const BackwardSchedule& schedule, uint32_t block, uint32_t shared_,
                                             int group) {
  constexpr BackwardTile kTile = Config::kTile;
  constexpr int kKeys = kTile.keys(), kQueries = kTile.queries, kHeadDim = kTile.head_dim, kCols = kTile.cols();
  constexpr int kOwn = kQueries / 2, kOwn8 = kOwn / 8, kOut8 = kCols / 8;  // a warpgroup's queries, and its columns
  constexpr int kAllBarrier = 1, kGroupBarrier = 2;  // named; one of all who compute, one a warpgroup
  constexpr int kAll = 128 * kTile.kConsumers;
  using Shared = BackwardShared<Config>;
  using KTile = typename Shared::KTile;
  using QTile = typename Shared::QTile;
  using DsTile = typename Shared::DsTile;
  using PTile = typename Shared::PTile;
  using OutTile = typename Shared::OutTile;
  using ptx::Major;
  constexpr int kRounds = kTile.dq_rounds, kRoundCols = Shared::kRoundCols, kRound8 = kRoundCols / 8;
  static_assert(kKeys == 64 && kQueries == 64 && kRounds <= 2);
  // The general body sends both rounds at once: kept for later, ptxas makes it wait for products that it need not
  // (C7517).
  constexpr bool kLate = kRounds == 2 && kPlain;

  const uint32_t thread_ = threadIdx.x % 128, thread = thread_, lane = thread % 32, shared = shared_;
  Ring<1> k_ring{shared + Shared::kKRing}, dq_ring{shared + Shared::kDqRing + group * Ring<1>::kBytes};
  Ring<Shared::kStages> q_ring{shared + Shared::kQRing};
  Ring<Shared::kDoutBuffers> dout_ring{shared + Shared::kDoutRing};
  const auto one_a_warp = [&](auto&& action) {
    if (lane == 0) action();
  };

  float dk[kOut8][4], dv[kOut8][4];
  float late[kRound8][4] = {};  // of dQ
  bool is_late = false;         // ... there is one,
  int late_row = 0;             // and its tile's first row

  // A round of this warp's 16 rows of the tile of dQ whose first row is i0.
  const auto send_dq = [&](const float (&x)[kRound8][4], int i0) {
    const int warp = __shfl_sync(~0u, int(forget(thread_) / 32), 0);  // for a branch that all lanes are seen to take
    const uint32_t to = forget(shared_) + Shared::kDq + (group * 64 + warp * 16) * kRoundCols * 4;
    dq_ring.wait_empty();
    if (i0 + (warp + 1) * tile::RowBlocks::kRows <= p.T) {
#pragma unroll
      for (int j = 0; j < kRound8; j++) ptx::st_shared_v4_f32(to + lane * 16 + j * 512, x[j]);
    } else {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int row = lane / 4 + 8 * h;
#pragma unroll
        for (int j = 0; j < kRound8; j++) {
          const uint32_t at = to + (row * kRoundCols + j * 8 + lane % 4 * 2) * 4;
          ptx::st_shared_f32(at, x[j][2 * h]), ptx::st_shared_f32(at + 4, x[j][2 * h + 1]);
        }
      }
    }
    ptx::fence_proxy_async();  // what was written, to the copy engine
    __syncwarp();
    one_a_warp([&] { ptx::mbarrier_arrive(dq_ring.full()); });
    dq_ring.next();
  };

  const int steps = schedule.steps(block);
#pragma unroll 1
  for (int list_step = 0; list_step < steps; list_step++) {
    KeyTile at{};
    if (!at.template find<kKeys, kQueries>(p, schedule, block, list_step)) continue;
    const int j0 = at.tile * kKeys;
    const Tiles tiles = at.tiles;
    if (tiles.begin >= tiles.end) {  // with parts the accumulators are clear
      if (schedule.parts == 1 && group == 0) clear_keys<Element>(p, at, j0, kHeadDim);
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
      constexpr int kHalfBytes = kCols / KTile::kPanelCols * KTile::kPanelBytes;  // K's and Q's panels are alike
      static_assert(KTile::kPanelBytes == QTile::kPanelBytes);
      const tile::Operand<KTile, Major::kK> k_operand(shared + Shared::kK), v_operand(shared + Shared::kV);
      const tile::Operand<QTile, Major::kK> q_operand(shared + Shared::kQ, group * kOwn);
      const tile::Operand<QTile, Major::kK> dout_operand(shared + Shared::kDout, group * kOwn);
      const tile::Operand<QTile, Major::kMN> q_cols_operand(shared + Shared::kQ + group * kHalfBytes);
      const tile::Operand<QTile, Major::kMN> dout_cols_operand(shared + Shared::kDout + group * kHalfBytes);
      const tile::Operand<KTile, Major::kMN> k_cols_operand(shared + Shared::kK + group * kHalfBytes);
      const tile::Operand<PTile, Major::kK> p_operand(shared + Shared::kP);
      const tile::Operand<PTile, Major::kK> dst_operand(shared + Shared::kP + PTile::kBytes);
      const tile::Operand<DsTile, Major::kK> ds_operand(shared + Shared::kDs);
      const uint32_t p_s = shared + Shared::kP + PTile::offset(warp * 16 + lane % 16, group * 4 + lane / 16);
      const uint32_t ds_s = shared + Shared::kDs +
                            DsTile::offset(group * kOwn + (lane >> 4) * 8 + (lane & 7), warp * 2 + (lane >> 3 & 1));
      const int lane_key = warp * 16 + lane / 4;  // of the tile; this lane's other key is 8 further on

      const int i0 = m * kQueries, j0 = forget(at.tile) * kKeys;
      const int lane_query = i0 + group * kOwn + int(lane) % 4 * 2;
      const Mask mask = forget(at.mask);
      const Range live_q = mask.live_queries();
      const uint32_t q_stage = q_ring.stage * QTile::kBytes, dout_stage = dout_ring.stage * QTile::kBytes;
      const uint32_t statistics =
          shared + Shared::kStatistics + q_ring.stage * Shared::kStatisticsBytes + group * kOwn * 4 + lane % 4 * 8;
      float s[kOwn8][4], dp[kOwn8][4];

      q_ring.wait_full();
      if constexpr (kMasked)
        clear_dead_rows<QTile>(shared + Shared::kQ + q_stage, i0, p.T, live_q, kGroupBarrier + group);
      ptx::pin(s);
      ptx::wgmma_fence();
#pragma unroll
      for (int k = 0; k < kHeadDim / 16; k++) {
        ptx::Wgmma<Element, kOwn>::template ss<Major::kK>(s, k_operand.step(k), q_operand.step(k, q_stage), k > 0);
      }
      ptx::wgmma_commit_group();
      dout_ring.wait_full();
      if constexpr (kMasked)
        clear_dead_rows<QTile>(shared + Shared::kDout + dout_stage, i0, p.T, live_q, kGroupBarrier + group);
      ptx::pin(dp);
      ptx::wgmma_fence();
#pragma unroll
      for (int k = 0; k < kHeadDim / 16; k++) {
        ptx::Wgmma<Element, kOwn>::template ss<Major::kK>(dp, v_operand.step(k), dout_operand.step(k, dout_stage),
                                                          k > 0);
      }
      ptx::wgmma_commit_group();
      if constexpr (kLate) {
        if (is_late) send_dq(late, late_row);
      }
      ptx::wgmma_wait_group<1>();
      ptx::pin(s);

      const Keep keep = p.keep(at.b, n);
      const DScore dscore = p.dscore(at.b, n);
      uint32_t seen[2] = {~0u, ~0u};
      if constexpr (kMasked) {
#pragma unroll
        for (int h = 0; h < 2; h++) seen[h] = column_bits(mask.queries(j0 + lane_key + 8 * h), lane_query);
      }
      const auto is_seen = [&](int j, int e) { return !kMasked || (seen[e / 2] >> (2 * j + e % 2) & 1); };
      // P from scores; in the general body scores from products, for dS asks for them.
#pragma unroll
      for (int j = 0; j < kOwn8; j++) {
        const float2 lse = ptx::ld_shared_v2_f32(statistics + j * 32);  // negative, log2
#pragma unroll
        for (int e = 0; e < 4; e++) {
          if constexpr (kPlain) {
            s[j][e] = ptx::ex2(fmaf(s[j][e], scale_log2, e % 2 ? lse.y : lse.x));
            if (!is_seen(j, e)) s[j][e] = 0;
          } else {
            s[j][e] = score.apply<Math>(s[j][e], lane_query + 8 * j + e % 2, j0 + lane_key + e / 2 * 8);
          }
        }
      }
      ptx::wgmma_wait_group<0>();
      ptx::pin(dp);
#pragma unroll
      for (int j = 0; j < kOwn8; j++) {
        const float2 delta = ptx::ld_shared_v2_f32(statistics + kQueries * 4 + j * 32);
        const float2 lse = ptx::ld_shared_v2_f32(statistics + j * 32);
#pragma unroll
        for (int e = 0; e < 4; e++) {
          if constexpr (kPlain) {
            dp[j][e] = s[j][e] * (dp[j][e] - (e % 2 ? delta.y : delta.x));
            if (!is_seen(j, e)) dp[j][e] = 0;
          } else {
            const int row = lane_query + 8 * j + e % 2, key = j0 + lane_key + e / 2 * 8;
            const float x = s[j][e], kept = keep.factor(row, key);
            const float probability = ptx::ex2(fmaf(x, kLog2e, e % 2 ? lse.y : lse.x));
            const float ds = probability * (dp[j][e] * kept - (e % 2 ? delta.y : delta.x));
            s[j][e] = is_seen(j, e) ? probability * kept : 0.0f;
            dp[j][e] = is_seen(j, e) ? ds * score.slope(x) : 0.0f;
            if (is_seen(j, e)) dscore(row, key, ds);
          }
        }
      }
      ptx::bar_sync(kAllBarrier, kAll);  // nobody reads the step before's P and dS
#pragma unroll
      for (int c = 0; c < kOwn8 / 2; c++) {
        uint32_t p_r[4], ds_r[4];
        tile::convert_c_to_a<Element>(p_r, s[2 * c], s[2 * c + 1]);
        tile::convert_c_to_a<Element>(ds_r, dp[2 * c], dp[2 * c + 1]);
        const uint32_t to = PTile::advance(p_s, 0, c);
        ptx::stmatrix_x4(to, p_r[0], p_r[1], p_r[2], p_r[3]);
        ptx::stmatrix_x4(to + PTile::kBytes, ds_r[0], ds_r[1], ds_r[2], ds_r[3]);
        ptx::stmatrix_x4_trans(DsTile::advance(ds_s, c, 0), ds_r[0], ds_r[1], ds_r[2], ds_r[3]);
      }
      ptx::fence_proxy_async();
      ptx::bar_sync(kAllBarrier, kAll);  // P and dS of all queries are there

      float dq[kOut8][4];
      ptx::pin(dv), ptx::pin(dq), ptx::pin(dk);
      ptx::wgmma_fence();
#pragma unroll
      for (int c = 0; c < kQueries / 16; c++) {
        ptx::Wgmma<Element, kCols>::template ss<Major::kMN>(dv, p_operand.step(c),
                                                            dout_cols_operand.step(c, dout_stage), 1);
      }
      ptx::wgmma_commit_group();
#pragma unroll
      for (int k = 0; k < kKeys / 16; k++) {
        ptx::Wgmma<Element, kCols>::template ss<Major::kMN>(dq, ds_operand.step(k), k_cols_operand.step(k), k > 0);
      }
      ptx::wgmma_commit_group();
#pragma unroll
      for (int c = 0; c < kQueries / 16; c++) {
        ptx::Wgmma<Element, kCols>::template ss<Major::kMN>(dk, dst_operand.step(c), q_cols_operand.step(c, q_stage),
                                                            1);
      }
      ptx::wgmma_commit_group();
      ptx::wgmma_wait_group<2>();
      ptx::pin(dv);
      one_a_warp([&] { dout_ring.release(); });
      dout_ring.next();
      ptx::wgmma_wait_group<1>();
      ptx::pin(dq);
      send_dq(reinterpret_cast<const float (&)[kRound8][4]>(dq), i0);
      ptx::wgmma_wait_group<0>();
      ptx::pin(dk);
      if constexpr (kLate) {
        is_late = true, late_row = i0;
#pragma unroll
        for (int x = 0; x < kRound8 * 4; x++) late[x / 4][x % 4] = dq[kRound8 + x / 4][x % 4];
      }
      one_a_warp([&] { q_ring.release(); });
      q_ring.next();
      if constexpr (kRounds == 2 && !kLate) send_dq(reinterpret_cast<const float (&)[kRound8][4]>(dq[kRound8]), i0);
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
      if constexpr (kLate) {
        send_dq(late, late_row);
        is_late = false;
#pragma unroll
        for (int x = 0; x < kRound8 * 4; x++) late[x / 4][x % 4] = 0;
      }
    }

    at.template find<kKeys, kQueries>(p, schedule, block, forget(list_step));  // not kept through the loops
    const uint32_t warp = forget(thread_) / 32;
    const int key0 = at.tile * kKeys;
    ptx::bar_sync(kAllBarrier, kAll);  // nobody reads K and V
    if (schedule.parts > 1) {
      const auto add = [&](const float (&x)[kOut8][4], float* to) {
        tile::add_fragments<false, 1>(reinterpret_cast<const float (&)[1][kOut8][4]>(x), to, {p.S, p.D},
                                      key0 + int(warp) * 16, group * kCols / 16);
      };
      add(dk, p.dk_acc.at<float>(at.b, at.k_head));
      add(dv, p.dv_acc.at<float>(at.b, at.k_head));
    } else {  // out through their places; the tensor maps keep rows and columns past the tensors from being written
      const int lane_key = key0 + int(warp) * 16 + int(lane) / 4;
      const Range live_keys = at.mask.live_keys();
      const bool live[2] = {live_keys.has(lane_key), live_keys.has(lane_key + 8)};  // else not even 0 times a NaN
      const auto stage = [&](const float (&x)[kOut8][4], uint32_t tile, float scale) {
        const uint32_t lane_s = tile + OutTile::offset(warp * 16 + lane % 16, lane / 16);
        const auto pair = [&](int j, int h) {
          return live[h] ? ptx::cvt_x2<Element>(x[j][2 * h] * scale, x[j][2 * h + 1] * scale) : 0u;
        };
#pragma unroll
        for (int c = 0; c < kCols / 16; c++) {
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
#pragma unroll
        for (int panel = 0; panel < OutTile::kPanels; panel++) {
          const int col = group * kCols + panel * OutTile::kPanelCols, offset = panel * OutTile::kPanelBytes;
          ptx::cp_async_bulk_tensor_4d_store(&tensors.dv.map, col, key0, at.k_head, tensors.dv.batch(at.b),
                                             dv_s + offset);
          ptx::cp_async_bulk_tensor_4d_store(&tensors.dk.map, col, key0, at.k_head, tensors.dk.batch(at.b),
                                             dk_s + offset);
        }
        ptx::cp_async_bulk_commit_group();
        ptx::cp_async_bulk_wait_group_read<0>();
      }
    }
    if (thread == 0) k_ring.release();
    __syncwarp();
    k_ring.next();
  }
  if (thread == 0) ptx::cp_async_bulk_wait_group<0>();  // before the block ends
}

}  // namespace jax_flash2::cuda::sm90
