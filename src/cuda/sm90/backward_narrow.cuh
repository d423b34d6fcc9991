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
#include "cuda/sm90/backward_consumer.cuh"
#include "cuda/sm90/backward_plan.cuh"
#include "cuda/sm90/backward_rows.cuh"
#include "cuda/tile/fragment.cuh"
#include "cuda/tile/operand.cuh"
#include "cuda/tile/row_blocks.cuh"

namespace jax_flash2::cuda::sm90 {

template <class Config, class Element, Body kBody>
struct NarrowTile : BackwardConsumer<Config> {
  static constexpr bool kPlain = kBody != Body::kGeneral, kSpans = kBody != Body::kPlain;
  using Base = BackwardConsumer<Config>;
  using Base::dk, Base::dv, Base::group, Base::dq_ring, Base::k_ring, Base::lane, Base::p, Base::q_ring, Base::thread;
  using Base::kTile, Base::kGroupBarrier, Base::one_a_warp, Base::sync_all, Base::score, Base::scale_log2;
  using Shared = typename Base::Shared;
  using KTile = typename Shared::KTile;
  using VTile = typename Shared::VTile;
  using QTile = typename Shared::QTile;
  using DoutTile = typename Shared::DoutTile;
  using DsTile = typename Shared::DsTile;
  static constexpr int kKeys = kTile.keys(), kQueries = kTile.queries, kCols8 = kQueries / 8;
  static constexpr int kHeadDim = kTile.head_dim, kValueDim = kTile.value_dim;

  using Base::Base;

  __device__ __forceinline__ Ring<Shared::kDoutBuffers> dout_ring() const {  // goes round with the other
    static_assert(Shared::kDoutBuffers == Shared::kStages);
    return {q_ring.barriers + Shared::kDoutRing - Shared::kQRing, q_ring.stage, q_ring.parity};
  }

  // dK and dV of the tile before leave from the places of dQ and dS, while K and V of this one arrive.
  __device__ __forceinline__ void begin(const KeyTile& at) {
    Base::begin(at);
    if (thread == 0) ptx::cp_async_bulk_wait_group_read<0>();
    sync_all();
  }

  template <bool kMasked>
  __device__ __forceinline__ void step(const Plans<Config, kSpans>& plans, int n, int m) {
    using ptx::Major;
    // What follows from these is worked out in each step: kept, it would take more registers than there are.
    const uint32_t shared = forget(this->shared), thread = forget(this->thread), lane = thread % 32, warp = thread / 32;
    const tile::Operand<KTile, Major::kK> k_operand(shared + Shared::kK, group * 64);
    const tile::Operand<VTile, Major::kK> v_operand(shared + Shared::kV, group * 64);
    const tile::Operand<QTile, Major::kK> q_operand(shared + Shared::kQ);
    const tile::Operand<DoutTile, Major::kK> dout_operand(shared + Shared::kDout);
    const tile::Operand<DoutTile, Major::kMN> dout_cols_operand(shared + Shared::kDout);
    const uint32_t ds_s =
        shared + Shared::kDs + DsTile::offset((lane >> 4) * 8 + (lane & 7), group * 8 + warp * 2 + (lane >> 3 & 1));
    const int lane_key = group * 64 + warp * 16 + lane / 4;  // of the tile; this lane's other key is 8 further on

    const int i0 = m * kQueries;
    const Mask mask = kMasked ? plans.mask(p) : Mask{};
    const Live live_q = mask.live_queries();
    const uint32_t q_stage = q_ring.stage * QTile::kBytes, dout_stage = q_ring.stage * DoutTile::kBytes;
    const uint32_t ds_stage = q_ring.stage * DsTile::kBytes;
    float s[kCols8][4], dp[kCols8][4];

    const auto key = [&] { return (kPlain && !kMasked ? 0 : plans.tile() * kKeys) + lane_key; };
    const auto query = [&] { return i0 + int(lane) % 4 * 2; };
    Seen seen;
    // With spans early: it waits for memory.
    if constexpr (kMasked && kSpans) seen = this->template see<kBody>(mask, key(), query());
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
    auto scores = this->template make_scores<kBody, kMasked>(shared, lane, seen, key(), query());
    if constexpr (!kPlain) {
      scores.look();
      ptx::wgmma_wait_group<0>();
      ptx::pin(s);
      scores.probabilities(s, scale_log2);
    }
    dout_ring().wait_full();
    if constexpr (kMasked)
      clear_dead_rows<DoutTile>(shared + Shared::kDout + dout_stage, i0, p.T, live_q, kGroupBarrier + group);
    ptx::pin(dp);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kValueDim / 16; k++) {
      ptx::Wgmma<Element, kQueries>::template ss<Major::kK>(dp, v_operand.step(k), dout_operand.step(k, dout_stage),
                                                            k > 0);
    }
    ptx::wgmma_commit_group();
    if constexpr (kPlain) {
      ptx::wgmma_wait_group<1>();
      ptx::pin(s);
      if constexpr (kMasked && !kSpans) seen = this->template see<kBody>(mask, key(), query());
      scores.probabilities(s, scale_log2);
    }
    uint32_t p_r[kCols8 / 2][4], ds_r[kCols8 / 2][4];
    constexpr bool kEarly =
        kPlain && (kCols8 < 16 || !kMasked);  // else there are no registers for P beside its float32
    if constexpr (kEarly) convert(p_r, s);
    ptx::wgmma_wait_group<0>();
    ptx::pin(dp);
    scores.gradients(s, dp);
    if constexpr (!kEarly) convert(p_r, s);
    convert(ds_r, dp);

    ptx::pin(dv), ptx::pin(p_r);
    ptx::wgmma_fence();
#pragma unroll
    for (int c = 0; c < kQueries / 16; c++) {
      ptx::Wgmma<Element, kValueDim>::template rs<Major::kMN>(dv, p_r[c], dout_cols_operand.step(c, dout_stage), 1);
    }
    ptx::wgmma_commit_group();
#pragma unroll
    for (int c = 0; c < kCols8 / 2; c++) {
      ptx::stmatrix_x4_trans(DsTile::advance(ds_s + ds_stage, c, 0), ds_r[c][0], ds_r[c][1], ds_r[c][2], ds_r[c][3]);
    }
    ptx::fence_proxy_async();
    sync_all();  // dS of all keys is there

    if constexpr (kTile.dq_cols(0) == kTile.dq_cols(1)) {
      multiply_ds<kMasked, kTile.dq_cols(0)>(shared, thread, i0, p_r, ds_r);
    } else if (group == 0) {
      multiply_ds<kMasked, kTile.dq_cols(0)>(shared, thread, i0, p_r, ds_r);
    } else {
      multiply_ds<kMasked, kTile.dq_cols(1)>(shared, thread, i0, p_r, ds_r);
    }
  }

  __device__ __forceinline__ void end_of_head() {}

  // Out through the places of dQ and dS.
  __device__ __forceinline__ void finish(const KeyTile& at) {
    one_a_warp([&] { k_ring.release(); });
    k_ring.next();
    if (this->schedule.parts == 1) {
      for (int g = 0; g < kTile.kConsumers; g++) {  // all of dQ has left
        Ring<1>{this->shared + Shared::kDqRing + g * Ring<1>::kBytes, 0, dq_ring.parity}.wait_empty();
      }
      sync_all();  // and nobody reads dS
    }
    this->template write_keys<Element>(at, at.tile * kKeys + group * 64);
  }

 private:
  static __device__ __forceinline__ void convert(uint32_t (&to)[kCols8 / 2][4], const float (&x)[kCols8][4]) {
#pragma unroll
    for (int c = 0; c < kCols8 / 2; c++) tile::convert_c_to_a<Element>(to[c], x[2 * c], x[2 * c + 1]);
  }

  // dQ = dS^T K, of which this warpgroup has kDqCols columns, perhaps none, and dK += dS Q, under dV += P dO.
  template <bool kMasked, int kDqCols>
  __device__ __forceinline__ void multiply_ds(uint32_t shared, uint32_t thread, int i0, uint32_t (&p_r)[kCols8 / 2][4],
                                              uint32_t (&ds_r)[kCols8 / 2][4]) {
    using ptx::Major;
    constexpr BackwardTile kTile = Config::kTile;
    const uint32_t lane = thread % 32, warp = thread / 32;
    const tile::Operand<DsTile, Major::kK> ds_operand(shared + Shared::kDs, kTile.dq_by_rows() ? group * 64 : 0);
    const tile::Operand<QTile, Major::kMN> q_cols_operand(shared + Shared::kQ);
    const tile::Operand<KTile, Major::kMN> k_cols_operand(
        shared + Shared::kK + kTile.dq_first_col(group) / KTile::kPanelCols * KTile::kPanelBytes);
    const uint32_t q_stage = q_ring.stage * QTile::kBytes, ds_stage = q_ring.stage * DsTile::kBytes;
    // This warp's rows of dQ, in the order of tile/row_blocks.cuh; each warpgroup's part alone, for the other's may
    // still be on its way out.
    const int dq_row = kTile.dq_by_rows() ? group * 64 + warp * 16 : warp * 16;
    const uint32_t dq_s = shared + Shared::kDq +
                          (kTile.dq_by_rows() ? dq_row * p.D : group * 64 * kTile.dq_cols(0) + dq_row * kDqCols) * 4;
    float dq[max_(kDqCols, 8) / 8][4];
    ptx::pin(dq);
    ptx::wgmma_fence();
    if constexpr (kDqCols > 0) {
#pragma unroll
      for (int k = 0; k < kKeys / 16; k++) {
        ptx::Wgmma<Element, kDqCols>::template ss<Major::kMN>(dq, ds_operand.step(k, ds_stage), k_cols_operand.step(k),
                                                              k > 0);
      }
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
    const auto store = [&]<bool kAll>() {
#pragma unroll
      for (int j = 0; j < kDqCols / 8; j++) {
        if (kAll || kTile.dq_first_col(group) + 8 * j < p.D) ptx::st_shared_v4_f32(dq_s + lane * 16 + j * 512, dq[j]);
      }
    };
    if (!kMasked || i0 + dq_row + tile::RowBlocks::kRows <= p.T) {  // else rows that do not exist
      if (!kMasked && p.D == kHeadDim) {
        store.template operator()<true>();
      } else {
        store.template operator()<false>();
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
  }
};

}  // namespace jax_flash2::cuda::sm90
