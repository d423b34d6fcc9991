// What the first warpgroup of a block of the backward does, a warp each: load tiles, work out the rows' statistics, add
// finished tiles of dQ to memory. Knows where things lie, not what is computed from them.
#pragma once
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "core/problem.h"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/sm90/backward_plan.cuh"
#include "cuda/softmax.cuh"
#include "cuda/tile/row_blocks.cuh"

namespace jax_flash2::cuda::sm90 {

// Calls enter(key tile) for each of a block's tiles that has something to do, and visit(plans, query head, query tile)
// for each pair of a tile's that is not wholly masked; leave(plans) after each tile. By a whole warp.
template <class Config, class Enter, class Visit, class Leave>
__device__ __forceinline__ void walk(uint32_t shared, const Enter& enter, const Visit& visit, const Leave& leave) {
  Plans<Config> plans(shared);
#pragma unroll 1
  for (; plans.next(); plans.done()) {
    const KeyTile at = plans.current();
    if (at.tiles.begin < at.tiles.end) {
      enter(at);
#pragma unroll 1
      for (int place = at.tiles.begin; place < plans.tiles().end; place++) {
        const int m = plans.query_tile(place);
#pragma unroll 1
        for (int n = plans.n_begin(); n < plans.n_end(); n++) visit(plans, n, m);
      }
    }
    leave(plans);
  }
}

// The next ticket of a call whose blocks wait for each other: who has it waits for lower ones alone, and they were drawn
// before. The counter stands behind those of the first head.
__device__ __forceinline__ uint32_t draw_ticket(const Problem& p) {
  return atomicAdd(static_cast<int*>(p.order.data) + (p.T + 31) / 32, 1);
}

// One thread: finds the block's key tiles, and loads K and V once a key tile, Q and dO once a step.
template <class Config>
__device__ __forceinline__ void feed_tiles(const Problem& p, const BackwardTensors& tensors,
                                           const BackwardSchedule& schedule, uint32_t shared) {
  using Shared = BackwardShared<Config>;
  using KTile = typename Shared::KTile;
  using VTile = typename Shared::VTile;
  using QTile = typename Shared::QTile;
  using DoutTile = typename Shared::DoutTile;
  Ring<1> k_ring{shared + Shared::kKRing};
  Ring<Shared::kStages> q_ring{shared + Shared::kQRing};
  Ring<Shared::kDoutBuffers> dout_ring{shared + Shared::kDoutRing};
  for (const MappedTensor* t : {&tensors.q, &tensors.k, &tensors.v, &tensors.dout, &tensors.dk, &tensors.dv})
    ptx::prefetch_tensormap(&t->map);

  const auto load = [&]<class Tile>(Tile, uint32_t to, const CUtensorMap& map, int row, int head, int batch,
                                    uint32_t barrier, uint64_t hint) {
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; panel++) {
      ptx::cp_async_bulk_tensor_4d_load(shared + to + panel * Tile::kPanelBytes, &map, panel * Tile::kPanelCols, row,
                                        head, batch, barrier, hint);
    }
  };
  Plans<Config> plans(shared);
  KeyTile at{};
  uint32_t unit = schedule.ordered ? draw_ticket(p) : blockIdx.x;
  int step = 0;
  const auto next = [&] {
    if (schedule.ordered) {
      unit = draw_ticket(p);
    } else {
      step++;
    }
  };
#pragma unroll 1
  for (; schedule.has(unit, step); next()) {
    const BackwardSchedule::Place place = schedule.place(unit, step);
    if (place.tile < 0) continue;
    at.template find<Config::kTile.keys(), Config::kTile.queries>(p, schedule, place);
    plans.publish(at);
    if (at.tiles.begin >= at.tiles.end) continue;
    const int k_row = at.tile * Config::kTile.keys();
    const int q_batch = tensors.q.batch(at.b), dout_batch = tensors.dout.batch(at.b);
    k_ring.wait_empty();
    ptx::mbarrier_arrive_expect_tx(k_ring.full(), KTile::kBytes + VTile::kBytes);
    load(KTile{}, Shared::kK, tensors.k.map, k_row, at.k_head, tensors.k.batch(at.b), k_ring.full(), ptx::kEvictFirst);
    load(VTile{}, Shared::kV, tensors.v.map, k_row, at.k_head, tensors.v.batch(at.b), k_ring.full(), ptx::kEvictFirst);
    k_ring.next();
#pragma unroll 1
    for (int place = at.tiles.begin; place < at.tiles.end; place++) {
      const int row = (at.flip < 0 ? place : at.flip - place) * Config::kTile.queries;
#pragma unroll 1
      for (int n = at.n_begin; n < at.n_end; n++) {
        q_ring.wait_empty();
        ptx::mbarrier_arrive_expect_tx(q_ring.full(), QTile::kBytes);
        load(QTile{}, Shared::kQ + q_ring.stage * QTile::kBytes, tensors.q.map, row, n, q_batch, q_ring.full(),
             ptx::kEvictLast);
        q_ring.next();
        dout_ring.wait_empty();
        ptx::mbarrier_arrive_expect_tx(dout_ring.full(), DoutTile::kBytes);
        load(DoutTile{}, Shared::kDout + dout_ring.stage * DoutTile::kBytes, tensors.dout.map, row, n, dout_batch,
             dout_ring.full(), ptx::kEvictLast);
        dout_ring.next();
      }
    }
  }
  at.tile = -1;
  plans.publish(at);
}

// One warp: of each query -lse in powers of two, and delta. P of a dead row is 0, whatever its lse holds. The values
// are read before their buffer is free, so that nobody waits for memory.
template <class Config>
__device__ __forceinline__ void feed_statistics(const Problem& p, const BackwardSchedule& schedule, uint32_t shared) {
  using Shared = BackwardShared<Config>;
  constexpr int kQueries = Config::kTile.queries, kPasses = kQueries / 32;
  const int lane = threadIdx.x % 32;
  Ring<Shared::kStages> q_ring{shared + Shared::kQRing};
  const float *lse_g = nullptr, *delta_g = nullptr;
  Range live{};
  walk<Config>(
      shared,
      [&](const KeyTile& at) {
        if (schedule.chores) HeadCounters(p, at.batch_row, at.k_head).wait_prepared(schedule.lists.units_of_head());
        lse_g = p.lse.at<const float>(at.b), delta_g = p.delta.at<const float>(at.b);
        live = at.mask.live_queries();
      },
      [&](const Plans<Config>&, int n, int m) {
        float lse[kPasses], delta[kPasses];
#pragma unroll
        for (int pass = 0; pass < kPasses; pass++) {
          const int i = m * kQueries + pass * 32 + lane;
          const bool alive = live.has(i);
          lse[pass] = alive ? lse_g[n * p.lse.head + i * p.lse.row] : INFINITY;
          delta[pass] = alive ? __ldcg(delta_g + n * p.delta.head + i * p.delta.row) : 0.0f;  // not an old one from L1
        }
        q_ring.wait_empty();
        const uint32_t to = shared + Shared::kStatistics + q_ring.stage * Shared::kStatisticsBytes + lane * 4;
#pragma unroll
        for (int pass = 0; pass < kPasses; pass++) {
          const float x = lse[pass];
          ptx::st_shared_f32(to + pass * 128, x == -INFINITY ? x : -x * kLog2e);
          ptx::st_shared_f32(to + kQueries * 4 + pass * 128, delta[pass]);
        }
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(q_ring.full());
        q_ring.next();
      },
      [](const Plans<Config>&) {});
}

// One warp: adds to memory what both warpgroups have worked out of dQ. Rows past T have no place in dq_acc; whole blocks
// of 16 rows are contiguous in it, and what a warpgroup has of their columns is too.
template <class Config>
__device__ __forceinline__ void drain_queries(const Problem& p, const BackwardSchedule& schedule, uint32_t shared) {
  using Shared = BackwardShared<Config>;
  constexpr BackwardTile kTile = Config::kTile;
  constexpr int kBlock = tile::RowBlocks::kRows;
  Ring<1> dq_ring{shared + Shared::kDqRing};
  const bool leads = threadIdx.x % 32 == 0;
  float* dq_g = nullptr;
  int* order_g = nullptr;
  // Whose turn is over is told a step later, or when this warp has to wait for its own: what was added is in memory by
  // then, and nobody stands still until it is.
  int* pending = nullptr;
  const auto tell = [&] {
    ptx::fence_proxy_async_global();
    __threadfence();
    atomicAdd(pending, 1);
    pending = nullptr;
  };
  // The part of one warpgroup, which lies alone in shared memory.
  const auto add = [&](int group, int round, float* to, int row0) {
    const int rows = min_(p.T - row0, 64);
    const uint32_t from = shared + Shared::kDq + group * 64 * (kTile.dq_by_rows() ? p.D : Shared::kRoundCols) * 4;
    if (kTile.dq_by_rows()) {
      if (rows > 0) ptx::cp_reduce_async_bulk_add_f32(to, from, rows * p.D * 4);
      return;
    }
    const int col = kTile.dq_first_col(group) + round * Shared::kRoundCols;
    const int row_cols = kTile.dq_cols(group) / kTile.dq_rounds, cols = min_(p.D - col, row_cols);
    if (cols <= 0) return;
    int row = 0;
#pragma unroll 1
    for (; row + kBlock <= rows; row += kBlock) {
      ptx::cp_reduce_async_bulk_add_f32(to + row * p.D + col * kBlock, from + row * row_cols * 4, cols * kBlock * 4);
    }
#pragma unroll 1
    for (; row < rows; row++) {
      ptx::cp_reduce_async_bulk_add_f32(to + row * p.D + col, from + row * row_cols * 4, cols * 4);
    }
  };
  walk<Config>(
      shared,
      [&](const KeyTile& at) {
        if (schedule.chores) HeadCounters(p, at.batch_row, at.k_head).wait_prepared(schedule.lists.units_of_head());
        dq_g = p.dq_acc.at<float>(at.b);
        if (schedule.ordered) order_g = p.order.at<int>(at.b);
      },
      [&](const Plans<Config>& plans, int n, int m) {
        if (!leads) return;
        float* const dq_n = dq_g + n * p.dq_acc.head;
        int* const turn = order_g + n * p.order.head + m;
#pragma unroll 1
        for (int round = 0; round < kTile.dq_rounds; round++) {
          dq_ring.wait_full();
          if (schedule.ordered && round == 0) {  // until every block whose turn is earlier has added its part
            const KeyTile at = plans.current();
            const Tiles writers =
                at.mask.key_tiles(m * kTile.queries, min_((m + 1) * kTile.queries, p.T), kTile.keys());
            const int before = schedule.descending ? writers.end - 1 - at.tile : at.tile - writers.begin;
            const auto early = [&] { return *reinterpret_cast<volatile int*>(turn) < before; };
            if (early() && pending) {
              ptx::cp_async_bulk_wait_group<0>();
              tell();
            }
            while (early()) {
            }
            __threadfence();
            ptx::fence_proxy_async_global();
          }
#pragma unroll 1
          for (int group = 0; group < kTile.kConsumers; group++) {
            const int row0 = m * kTile.queries + (kTile.dq_by_rows() ? group * 64 : 0);
            add(group, round, dq_n + int64_t(row0) * p.D, row0);
          }
          ptx::cp_async_bulk_commit_group();
          ptx::cp_async_bulk_wait_group_read<0>();
          dq_ring.release();
          dq_ring.next();
          if (pending) {
            ptx::cp_async_bulk_wait_group<1>();
            tell();
          }
        }
        if (schedule.ordered) pending = turn;
      },
      [&](const Plans<Config>& plans) {
        if (!schedule.chores || !leads) return;
        const KeyTile at = plans.current();
        if (!at.ends_unit) return;
        ptx::cp_async_bulk_wait_group<0>();
        HeadCounters(p, at.batch_row, at.k_head).tell_added();
      });
  if (!leads) return;
  ptx::cp_async_bulk_wait_group<0>();  // before the block ends
  if (pending) tell();
}

}  // namespace jax_flash2::cuda::sm90
