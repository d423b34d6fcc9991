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
#include "cuda/sm90/backward_consumer.cuh"
#include "cuda/sm90/backward_plan.cuh"
#include "cuda/sm90/backward_rows.cuh"
#include "cuda/tile/fragment.cuh"
#include "cuda/tile/operand.cuh"
#include "cuda/tile/row_blocks.cuh"

namespace jax_flash2::cuda::sm90 {

template <class Config, class Element, Body kBody>
struct WideTile : BackwardConsumer<Config> {
  static constexpr bool kPlain = kBody != Body::kGeneral, kSpans = kBody != Body::kPlain;
  using Base = BackwardConsumer<Config>;
  using Base::dk, Base::dv, Base::group, Base::dq_ring, Base::k_ring, Base::lane, Base::p, Base::q_ring, Base::thread;
  using Base::first_query, Base::kKeyCols, Base::kOwn, Base::kValueCols;
  using Base::kTile, Base::kGroupBarrier, Base::one_a_warp, Base::sync_all, Base::score, Base::scale_log2;
  using Shared = typename Base::Shared;
  using KTile = typename Shared::KTile;
  using VTile = typename Shared::VTile;
  using QTile = typename Shared::QTile;
  using DoutTile = typename Shared::DoutTile;
  using DsTile = typename Shared::DsTile;
  using PTile = typename Shared::PTile;
  static constexpr int kKeys = kTile.keys(), kQueries = kTile.queries;
  static constexpr int kHeadDim = kTile.head_dim, kValueDim = kTile.value_dim;
  static constexpr int kOwn8 = kOwn / 8;
  static constexpr int kRounds = kTile.dq_rounds, kRoundCols = Shared::kRoundCols, kRound8 = kRoundCols / 8;
  static_assert(kKeys == 64 && kQueries == 64 && kRounds <= 2 && kTile.dq_cols(0) == kKeyCols);
  // The general body sends both rounds at once: kept for later, ptxas makes it wait for products that it need not
  // (C7517).
  static constexpr bool kLate = kRounds == 2 && kPlain;

  Ring<Shared::kDoutBuffers> dout_ring{this->shared + Shared::kDoutRing};
  float late[kRound8][4] = {};  // of dQ
  bool is_late = false;         // ... there is one,
  int late_row = 0;             // and its tile's first row

  using Base::Base;

  template <bool kMasked>
  __device__ __forceinline__ void step(const Plans<Config, kSpans>& plans, int n, int m) {
    using ptx::Major;
    // What follows from these is worked out in each step: kept, it would take more registers than there are.
    const uint32_t shared = forget(this->shared), thread = forget(this->thread), lane = thread % 32, warp = thread / 32;
    static_assert(KTile::kPanelBytes == QTile::kPanelBytes);
    constexpr int kKeyPart = kKeyCols / KTile::kPanelCols * KTile::kPanelBytes;  // of a tile: a warpgroup's columns
    constexpr int kValuePart = kValueCols / DoutTile::kPanelCols * DoutTile::kPanelBytes;
    const tile::Operand<KTile, Major::kK> k_operand(shared + Shared::kK);
    const tile::Operand<VTile, Major::kK> v_operand(shared + Shared::kV);
    const tile::Operand<QTile, Major::kK> q_operand(shared + Shared::kQ, first_query());
    const tile::Operand<DoutTile, Major::kK> dout_operand(shared + Shared::kDout, first_query());
    const tile::Operand<QTile, Major::kMN> q_cols_operand(shared + Shared::kQ + group * kKeyPart);
    const tile::Operand<DoutTile, Major::kMN> dout_cols_operand(shared + Shared::kDout + group * kValuePart);
    const tile::Operand<KTile, Major::kMN> k_cols_operand(shared + Shared::kK + group * kKeyPart);
    const tile::Operand<PTile, Major::kK> p_operand(shared + Shared::kP);
    const tile::Operand<PTile, Major::kK> dst_operand(shared + Shared::kP + PTile::kBytes);
    const tile::Operand<DsTile, Major::kK> ds_operand(shared + Shared::kDs);
    const uint32_t p_s = shared + Shared::kP + PTile::offset(warp * 16 + lane % 16, group * 4 + lane / 16);
    const uint32_t ds_s =
        shared + Shared::kDs + DsTile::offset(first_query() + (lane >> 4) * 8 + (lane & 7), warp * 2 + (lane >> 3 & 1));

    const int i0 = m * kQueries;
    const Mask mask = kMasked ? plans.mask(p) : Mask{};
    const Live live_q = mask.live_queries();
    const uint32_t q_stage = q_ring.stage * QTile::kBytes, dout_stage = dout_ring.stage * DoutTile::kBytes;
    float s[kOwn8][4], dp[kOwn8][4];

    const int key = (kPlain && !kMasked ? 0 : plans.tile() * kKeys) + int(warp) * 16 + int(lane) / 4,
              query = i0 + first_query() + int(lane) % 4 * 2;
    Seen seen;
    if constexpr (kMasked && kSpans) seen = this->template see<kBody>(mask, key, query);  // early: it waits for memory
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
    auto scores = this->template make_scores<kBody, kMasked>(shared, lane, seen, key, query);
    if constexpr (!kPlain) {
      scores.look();
      ptx::wgmma_wait_group<0>();
      ptx::pin(s);
      scores.probabilities(s, scale_log2);
    }
    dout_ring.wait_full();
    if constexpr (kMasked)
      clear_dead_rows<DoutTile>(shared + Shared::kDout + dout_stage, i0, p.T, live_q, kGroupBarrier + group);
    ptx::pin(dp);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kValueDim / 16; k++) {
      ptx::Wgmma<Element, kOwn>::template ss<Major::kK>(dp, v_operand.step(k), dout_operand.step(k, dout_stage), k > 0);
    }
    ptx::wgmma_commit_group();
    if constexpr (kLate) {
      if (is_late) send_dq(late, late_row);
    }
    if constexpr (kPlain) {
      ptx::wgmma_wait_group<1>();
      ptx::pin(s);
      if constexpr (kMasked && !kSpans) seen = this->template see<kBody>(mask, key, query);
      scores.probabilities(s, scale_log2);
    }
    ptx::wgmma_wait_group<0>();
    ptx::pin(dp);
    scores.gradients(s, dp);
    sync_all();  // nobody reads the step before's P and dS
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
    sync_all();  // P and dS of all queries are there

    float dq[kKeyCols / 8][4];
    ptx::pin(dv), ptx::pin(dq), ptx::pin(dk);
    ptx::wgmma_fence();
#pragma unroll
    for (int c = 0; c < kQueries / 16; c++) {
      ptx::Wgmma<Element, kValueCols>::template ss<Major::kMN>(dv, p_operand.step(c),
                                                               dout_cols_operand.step(c, dout_stage), 1);
    }
    ptx::wgmma_commit_group();
#pragma unroll
    for (int k = 0; k < kKeys / 16; k++) {
      ptx::Wgmma<Element, kKeyCols>::template ss<Major::kMN>(dq, ds_operand.step(k), k_cols_operand.step(k), k > 0);
    }
    ptx::wgmma_commit_group();
#pragma unroll
    for (int c = 0; c < kQueries / 16; c++) {
      ptx::Wgmma<Element, kKeyCols>::template ss<Major::kMN>(dk, dst_operand.step(c), q_cols_operand.step(c, q_stage),
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
  }

  __device__ __forceinline__ void end_of_head() {
    if constexpr (kLate) {
      send_dq(late, late_row);
      is_late = false;
#pragma unroll
      for (int x = 0; x < kRound8 * 4; x++) late[x / 4][x % 4] = 0;
    }
  }

  // Out through the places of K and V.
  __device__ __forceinline__ void finish(const KeyTile& at) {
    sync_all();  // nobody reads K and V
    this->template write_keys<Element>(at, at.tile * kKeys);
    if (thread == 0) {
      ptx::cp_async_bulk_wait_group_read<0>();
      k_ring.release();
    }
    __syncwarp();
    k_ring.next();
  }

 private:
  // A round of this warp's 16 rows of the tile of dQ whose first row is i0.
  __device__ __forceinline__ void send_dq(const float (&x)[kRound8][4], int i0) {
    const int warp = __shfl_sync(~0u, int(forget(thread) / 32), 0);  // for a branch that all lanes are seen to take
    const uint32_t to = forget(this->shared) + Shared::kDq + (group * 64 + warp * 16) * kRoundCols * 4;
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
  }
};

}  // namespace jax_flash2::cuda::sm90
