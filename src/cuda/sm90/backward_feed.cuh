// What the first warpgroup of a block of the backward does, a warp each: load tiles, work out the rows' statistics, add
// finished tiles of dQ to memory. Knows where things lie, not what is computed from them.
#pragma once
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "core/problem.h"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/score.cuh"
#include "cuda/sm90/backward_plan.cuh"
#include "cuda/tile/row_blocks.cuh"

namespace jax_flash2::cuda::sm90 {

// Calls enter(key tile) for each of a block's tiles that has something to do, and visit(plans, query head, query tile)
// for each pair of a tile's that is not wholly masked; leave(plans) after each tile. By a whole warp.
template <class Config, bool kSpans, class Enter, class Visit, class Leave>
__device__ __forceinline__ void walk(const Problem& p, uint32_t shared, const Enter& enter, const Visit& visit,
                                     const Leave& leave) {
  Plans<Config, kSpans> plans(shared);
#pragma unroll 1
  for (; plans.next(); plans.done()) {
    const KeyTile at = plans.current(p);
    if (at.tiles.begin < at.tiles.end) {
      enter(at);
#pragma unroll 1
      for (int n = at.n_begin; n < plans.n_end(); n++) {
        const Tiles tiles = plans.tiles();
#pragma unroll 1
        for (int m = tiles.begin; m < tiles.end; m++) visit(plans, n, m);
      }
    }
    leave(plans);
  }
}

// The next ticket of a call. Where blocks wait for each other, who has it waits for lower ones alone, whose blocks have
// begun.
__device__ __forceinline__ uint32_t draw_ticket(const Problem& p) { return atomicAdd(p.tickets(), 1); }

// One thread: finds the block's key tiles, and loads K and V once a key tile, Q and dO once a step.
template <class Config, bool kSpans>
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
  constexpr int kEarly = 2;  // steps before a tile's end the next ticket is drawn: any earlier, and long ones wait here
  Plans<Config, kSpans> plans(shared);
  const uint32_t block = schedule.ordered ? draw_ticket(p) : blockIdx.x;
  const bool drawn = schedule.drawn;
  const int steps = drawn ? INT32_MAX : schedule.steps(block);
  KeyTile at{};
  constexpr uint32_t kNone = ~0u;
  uint32_t ticket = kNone;  // the next one
#pragma unroll 1
  for (int step = 0; step < steps; step++) {
    if (drawn && ticket == kNone) ticket = draw_ticket(p);
    if (drawn && ticket >= schedule.tickets()) break;
    const BackwardSchedule::Place place = drawn ? schedule.drawn_place<kSpans>(ticket) : schedule.place(block, step);
    ticket = kNone;
    if (place.tile < 0) continue;
    at.template find<Config::kTile.keys(), Config::kTile.queries, kSpans>(p, schedule, place);
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
    for (int n = at.n_begin; n < at.n_end; n++) {
#pragma unroll 1
      for (int m = at.tiles.begin; m < at.tiles.end; m++) {
        const int row = m * Config::kTile.queries;
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
        const bool ends = n == at.n_end - 1 && m == max_(at.tiles.begin, at.tiles.end - kEarly);
        if (drawn && ends) ticket = draw_ticket(p);
      }
    }
  }
  at.tile = -1;
  plans.publish(at);
}

// One warp: of each query -lse, in powers of two but for the general body, and delta. P of a dead row is 0, whatever its
// lse holds. The values are read before their buffer is free, so that nobody waits for memory.
template <class Config, Body kBody>
__device__ __forceinline__ void feed_statistics(const Problem& p, const BackwardSchedule& schedule, uint32_t shared) {
  constexpr bool kSpans = kBody != Body::kPlain;
  constexpr float kUnit = kBody == Body::kGeneral ? 1.0f : kLog2e;
  using Shared = BackwardShared<Config>;
  constexpr int kQueries = Config::kTile.queries, kPasses = kQueries / 32;
  const int lane = threadIdx.x % 32;
  Ring<Shared::kStages> q_ring{shared + Shared::kQRing};
  const float *lse_g = nullptr, *delta_g = nullptr;
  Live live{};
  walk<Config, kSpans>(
      p, shared,
      [&](const KeyTile& at) {
        if (schedule.chores) HeadCounters(p, at.batch_row, at.k_head).wait_prepared(schedule.lists.units_of_head());
        lse_g = p.lse.at<const float>(at.b), delta_g = p.delta.at<const float>(at.b);
        live = at.mask.live_queries();
      },
      [&](const Plans<Config, kSpans>&, int n, int m) {
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
          ptx::st_shared_f32(to + pass * 128, x == -INFINITY ? x : -x * kUnit);
          ptx::st_shared_f32(to + kQueries * 4 + pass * 128, delta[pass]);
        }
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(q_ring.full());
        q_ring.next();
      },
      [](const Plans<Config, kSpans>&) {});
}

// One warp: adds to memory what the warpgroups from `first_group` to `end_group` have worked out of dQ. Rows past T have
// no place in dq_acc; whole blocks of 16 rows are contiguous in it, and what a warpgroup has of their columns is too.
template <class Config, bool kSpans>
__device__ __forceinline__ void drain_queries(const Problem& p, const BackwardSchedule& schedule, uint32_t shared,
                                              int first_group, int end_group) {
  using Shared = BackwardShared<Config>;
  constexpr BackwardTile kTile = Config::kTile;
  constexpr int kBlock = tile::RowBlocks::kRows;
  Ring<1> dq_ring{shared + Shared::kDqRing};  // the first of the warpgroups'; they go round together
  const auto ring_of = [&](int group) {
    return Ring<1>{dq_ring.barriers + group * Ring<1>::kBytes, dq_ring.stage, dq_ring.parity};
  };
  const bool leads = threadIdx.x % 32 == 0;
  float* dq_g = nullptr;
  int* order_g = nullptr;
  // The part of one warpgroup, which lies alone in shared memory: they leave at different times.
  const auto add = [&](int group, int round, float* dq_n, int m) {
    const int row0 = m * kTile.queries + (kTile.dq_by_rows() ? group * 64 : 0), rows = min_(p.T - row0, 64);
    const uint32_t from = shared + Shared::kDq + group * 64 * (kTile.dq_by_rows() ? p.D : Shared::kRoundCols) * 4;
    float* const to = dq_n + int64_t(row0) * p.D;
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
  walk<Config, kSpans>(
      p, shared,
      [&](const KeyTile& at) {
        if (schedule.chores) HeadCounters(p, at.batch_row, at.k_head).wait_prepared(schedule.lists.units_of_head());
        dq_g = p.dq_acc.at<float>(at.b);
        if (schedule.ordered) order_g = p.order.at<int>(at.b);
      },
      [&](const Plans<Config, kSpans>& plans, int n, int m) {
        if (!leads) return;
        int* const turn = order_g + n * p.order.head + m;
#pragma unroll 1
        for (int round = 0; round < kTile.dq_rounds; round++) {
          ring_of(first_group).wait_full();
          if (schedule.ordered && round == 0) {  // until every block whose turn is earlier has added its parts
            const int before =
                plans.mask(p).key_tiles_before(plans.tile(), m, kTile.queries, kTile.keys(), schedule.descending);
            while (*reinterpret_cast<volatile int*>(turn) < before * kTile.kConsumers) {
            }
            __threadfence();
            ptx::fence_proxy_async_global();
          }
#pragma unroll 1
          for (int group = first_group; group < end_group; group++) {
            ring_of(group).wait_full();
            add(group, round, dq_g + n * p.dq_acc.head, m);
          }
          ptx::cp_async_bulk_commit_group();
          if (schedule.ordered) {
            ptx::cp_async_bulk_wait_group<0>();
          } else {
            ptx::cp_async_bulk_wait_group_read<0>();
          }
#pragma unroll 1
          for (int group = first_group; group < end_group; group++) ring_of(group).release();
          dq_ring.next();
        }
        if (schedule.ordered) {
          ptx::fence_proxy_async_global();
          __threadfence();
          atomicAdd(turn, 1);
        }
      },
      [&](const Plans<Config, kSpans>& plans) {
        if (!schedule.chores || !leads) return;
        const KeyTile at = plans.current(p);
        if (!at.ends_unit) return;
        ptx::cp_async_bulk_wait_group<0>();
        HeadCounters(p, at.batch_row, at.k_head).tell_added();
      });
  if (leads) ptx::cp_async_bulk_wait_group<0>();  // before the block ends
}

}  // namespace jax_flash2::cuda::sm90
