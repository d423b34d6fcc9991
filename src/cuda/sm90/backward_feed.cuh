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

// Calls what(key tile) for each step of a block's list that has something to do, and visit(n, query tile) for each pair
// of a tile's that is not wholly masked.
template <class Config, class Enter, class Visit>
__device__ __forceinline__ void walk(const Problem& p, const BackwardSchedule& schedule, uint32_t block,
                                     const Enter& enter, const Visit& visit) {
  const int steps = schedule.steps(block);
#pragma unroll 1
  for (int step = 0; step < steps; step++) {
    KeyTile at{};
    if (!at.template find<Config::kTile.keys(), Config::kTile.queries>(p, schedule, block, step)) continue;
    if (at.tiles.begin >= at.tiles.end) continue;
    enter(at);
#pragma unroll 1
    for (int n = at.n_begin; n < at.n_end; n++) {
#pragma unroll 1
      for (int m = at.tiles.begin; m < at.tiles.end; m++) visit(at, n, m);
    }
  }
}

// One thread: K and V once a key tile, Q and dO once a step.
template <class Config>
__device__ __forceinline__ void feed_tiles(const Problem& p, const BackwardTensors& tensors,
                                           const BackwardSchedule& schedule, uint32_t block, uint32_t shared) {
  using Shared = BackwardShared<Config>;
  using KTile = typename Shared::KTile;
  using QTile = typename Shared::QTile;
  Ring<1> k_ring{shared + Shared::kKRing};
  Ring<Shared::kStages> q_ring{shared + Shared::kQRing};
  Ring<Shared::kDoutBuffers> dout_ring{shared + Shared::kDoutRing};
  ptx::prefetch_tensormap(&tensors.q.map), ptx::prefetch_tensormap(&tensors.k.map);
  ptx::prefetch_tensormap(&tensors.v.map), ptx::prefetch_tensormap(&tensors.dout.map);
  ptx::prefetch_tensormap(&tensors.dk.map), ptx::prefetch_tensormap(&tensors.dv.map);

  const auto load = [&]<class Tile>(uint32_t to, const CUtensorMap& map, int row, int head, int batch, uint32_t barrier,
                                    uint64_t hint) {
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; panel++) {
      ptx::cp_async_bulk_tensor_4d_load(shared + to + panel * Tile::kPanelBytes, &map, panel * Tile::kPanelCols, row,
                                        head, batch, barrier, hint);
    }
  };
  int q_batch = 0, dout_batch = 0;
  walk<Config>(
      p, schedule, block,
      [&](const KeyTile& at) {
        const int row = at.tile * Config::kTile.keys();
        q_batch = tensors.q.batch(at.b), dout_batch = tensors.dout.batch(at.b);
        k_ring.wait_empty();
        ptx::mbarrier_arrive_expect_tx(k_ring.full(), 2 * KTile::kBytes);
        load.template operator()<KTile>(Shared::kK, tensors.k.map, row, at.k_head, tensors.k.batch(at.b), k_ring.full(),
                                        ptx::kEvictFirst);
        load.template operator()<KTile>(Shared::kV, tensors.v.map, row, at.k_head, tensors.v.batch(at.b), k_ring.full(),
                                        ptx::kEvictFirst);
        k_ring.next();
      },
      [&](const KeyTile&, int n, int m) {
        const int row = m * Config::kTile.queries;
        q_ring.wait_empty();
        ptx::mbarrier_arrive_expect_tx(q_ring.full(), QTile::kBytes);
        load.template operator()<QTile>(Shared::kQ + q_ring.stage * QTile::kBytes, tensors.q.map, row, n, q_batch,
                                        q_ring.full(), ptx::kEvictLast);
        q_ring.next();
        dout_ring.wait_empty();
        ptx::mbarrier_arrive_expect_tx(dout_ring.full(), QTile::kBytes);
        load.template operator()<QTile>(Shared::kDout + dout_ring.stage * QTile::kBytes, tensors.dout.map, row, n,
                                        dout_batch, dout_ring.full(), ptx::kEvictLast);
        dout_ring.next();
      });
}

// One warp: of each query -lse in powers of two, and delta. P of a dead row is 0, whatever its lse holds. The values
// are read before their buffer is free, so that nobody waits for memory.
template <class Config>
__device__ __forceinline__ void feed_statistics(const Problem& p, const BackwardSchedule& schedule, uint32_t block,
                                                uint32_t shared) {
  using Shared = BackwardShared<Config>;
  constexpr int kQueries = Config::kTile.queries, kPasses = kQueries / 32;
  const int lane = threadIdx.x % 32;
  Ring<Shared::kStages> q_ring{shared + Shared::kQRing};
  const float *lse_g = nullptr, *delta_g = nullptr;
  Range live{};
  walk<Config>(
      p, schedule, block,
      [&](const KeyTile& at) {
        lse_g = p.lse.at<const float>(at.b), delta_g = p.delta.at<const float>(at.b);
        live = at.mask.live_queries();
      },
      [&](const KeyTile&, int n, int m) {
        float lse[kPasses], delta[kPasses];
#pragma unroll
        for (int pass = 0; pass < kPasses; pass++) {
          const int i = m * kQueries + pass * 32 + lane;
          const bool alive = live.has(i);
          lse[pass] = alive ? lse_g[n * p.lse.head + i * p.lse.row] : INFINITY;
          delta[pass] = alive ? delta_g[n * p.delta.head + i * p.delta.row] : 0.0f;
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
      });
}

// One thread: adds what warpgroup `group` has worked out of dQ. Rows past T have no place in dq_acc; whole blocks of 16
// rows are contiguous in it, and what a warpgroup has of their columns is too.
template <class Config>
__device__ __forceinline__ void drain_queries(const Problem& p, const BackwardSchedule& schedule, uint32_t block,
                                              uint32_t shared, int group) {
  using Shared = BackwardShared<Config>;
  constexpr BackwardTile kTile = Config::kTile;
  constexpr int kBlock = tile::RowBlocks::kRows;
  Ring<1> dq_ring{shared + Shared::kDqRing + group * Ring<1>::kBytes};
  // Each warpgroup's part lies alone in shared memory: they leave at different times.
  const bool by_rows = kTile.dq_by_rows();
  const int first_col = kTile.dq_first_col(group), row_cols = kTile.dq_cols(group) / kTile.dq_rounds;
  const uint32_t from = shared + Shared::kDq + group * 64 * (by_rows ? p.D : Shared::kRoundCols) * 4;
  float* dq_g = nullptr;
  int* order_g = nullptr;
  walk<Config>(
      p, schedule, block,
      [&](const KeyTile& at) {
        dq_g = p.dq_acc.at<float>(at.b);
        if (schedule.ordered) order_g = p.order.at<int>(at.b);
      },
      [&](const KeyTile& at, int n, int m) {
        const int row0 = m * kTile.queries + (kTile.dq_by_rows() ? group * 64 : 0), rows = min_(p.T - row0, 64);
        float* const to = dq_g + n * p.dq_acc.head + int64_t(row0) * p.D;
        int* const turn = order_g + n * p.order.head + m;
#pragma unroll 1
        for (int round = 0; round < kTile.dq_rounds; round++) {
          dq_ring.wait_full();
          if (schedule.ordered && round == 0) {  // until every block whose turn is earlier has added its parts
            const Tiles writers =
                at.mask.key_tiles(m * kTile.queries, min_((m + 1) * kTile.queries, p.T), kTile.keys());
            const int before = schedule.descending ? writers.end - 1 - at.tile : at.tile - writers.begin;
            while (*reinterpret_cast<volatile int*>(turn) < before * kTile.kConsumers) {
            }
            __threadfence();
            ptx::fence_proxy_async_global();
          }
          const int col = first_col + round * Shared::kRoundCols;
          const int cols = min_(p.D - col, row_cols);
          if (kTile.dq_by_rows()) {
            if (rows > 0) ptx::cp_reduce_async_bulk_add_f32(to, from, rows * p.D * 4);
          } else if (cols > 0) {
            int row = 0;
#pragma unroll 1
            for (; row + kBlock <= rows; row += kBlock) {
              ptx::cp_reduce_async_bulk_add_f32(to + row * p.D + col * kBlock, from + row * row_cols * 4,
                                                cols * kBlock * 4);
            }
#pragma unroll 1
            for (; row < rows; row++) {
              ptx::cp_reduce_async_bulk_add_f32(to + row * p.D + col, from + row * row_cols * 4, cols * 4);
            }
          }
          ptx::cp_async_bulk_commit_group();
          if (schedule.ordered) {
            ptx::cp_async_bulk_wait_group<0>();
          } else {
            ptx::cp_async_bulk_wait_group_read<0>();
          }
          dq_ring.release();
          dq_ring.next();
        }
        if (schedule.ordered) {
          ptx::fence_proxy_async_global();
          __threadfence();
          atomicAdd(turn, 1);
        }
      });
  ptx::cp_async_bulk_wait_group<0>();  // before the block ends
}

}  // namespace jax_flash2::cuda::sm90
