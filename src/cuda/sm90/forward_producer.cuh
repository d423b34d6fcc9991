// Who feeds a block of the forward, tile after tile as the planner hands them over: a thread that loads Q and one that loads
// K and V. They know no schedule.
#pragma once
#include <cstdint>

#include "core/problem.h"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/sm90/forward_work.cuh"

namespace jax_flash2::cuda::sm90 {

// Calls load(work) for each tile, by one thread, and releases its Work after it.
template <class Config, class Load>
__device__ __forceinline__ void each_work(uint32_t shared, Load&& load) {
  using Shared = ForwardShared<Config>;
  typename Shared::WorkRing ring{shared + Shared::kWorkRing};
#pragma unroll 1
  for (;; ring.next()) {
    ring.wait_full();
    const uint32_t work = shared + Shared::kWork + ring.stage * Shared::kWorkBytes;
    const int kind = int(ptx::ld_shared_b32(work));
    if (kind == Work::kEnd) return;
    if (kind == Work::kTile) load(work);
    ring.release();
  }
}

template <class Config>
__device__ __forceinline__ void load_queries(const ForwardPlan& plan, uint32_t shared) {
  constexpr int kConsumers = Config::kTile.consumers;
  using Shared = ForwardShared<Config>;
  using Tile = typename Shared::QTile;
  ptx::prefetch_tensormap(&plan.q.map);
  typename Shared::QRing rings[kConsumers];
#pragma unroll
  for (int c = 0; c < kConsumers; c++) rings[c].barriers = shared + Shared::q_ring(c);
  each_work<Config>(shared, [&](uint32_t work) {
    const int row0 = int(ptx::ld_shared_b32(work + offsetof(Work, row0)));
    const int head = int(ptx::ld_shared_b32(work + offsetof(Work, q_head)));
    const int batch = plan.q.batch(read_batch(work));
#pragma unroll
    for (int c = 0; c < kConsumers; c++) {
      const Tiles tiles = read_tiles(work + sizeof(Work) + c * sizeof(Tiles));
      if (tiles.begin >= tiles.end) continue;
      auto& ring = rings[c];
      ring.wait_empty();
      ptx::mbarrier_arrive_expect_tx(ring.full(), Tile::kBytes);
#pragma unroll
      for (int panel = 0; panel < Tile::kPanels; panel++) {
        ptx::cp_async_bulk_tensor_5d_load(shared + Shared::q(c) + ring.stage * Tile::kBytes + panel * Tile::kPanelBytes,
                                          &plan.q.map, panel * Tile::kPanelCols, 0, (row0 + c * 64) >> plan.pack_log2,
                                          head, batch, ring.full(), ptx::kEvictFirst);
      }
      ring.next();
    }
  });
}

template <class Config, Body kBody>
__device__ __forceinline__ void load_keys(const ForwardPlan& plan, uint32_t shared) {
  // Tiles of keys that are left to load when the planner is told to go on: to look for spans takes it a while.
  constexpr int kLeft = kBody == Body::kPlain ? 0 : 4;
  using Shared = ForwardShared<Config>;
  ptx::prefetch_tensormap(&plan.k.map), ptx::prefetch_tensormap(&plan.v.map);
  typename Shared::KRing k_ring{shared + Shared::kKRing};
  typename Shared::VRing v_ring{shared + Shared::kVRing};
  const auto load = [&]<class Tile>(auto& ring, int buffers, const CUtensorMap& map, int kv_tile, int head, int batch) {
    ring.wait_empty();
    ptx::mbarrier_arrive_expect_tx(ring.full(), Tile::kBytes);
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; panel++) {
      ptx::cp_async_bulk_tensor_4d_load(shared + buffers + ring.stage * Tile::kBytes + panel * Tile::kPanelBytes, &map,
                                        panel * Tile::kPanelCols, kv_tile * Config::kTile.keys, head, batch,
                                        ring.full(), ptx::kEvictLast);
    }
    ring.next();
  };
  each_work<Config>(shared, [&](uint32_t work) {
    const Tiles tiles = read_tiles(work + offsetof(Work, tiles));
    const int head = int(ptx::ld_shared_b32(work + offsetof(Work, kv_head)));
    const Batch b = read_batch(work);
    const int k_batch = plan.k.batch(b), v_batch = plan.v.batch(b);
    const auto load_k = [&](int kv_tile) {
      load.template operator()<typename Shared::KTile>(k_ring, Shared::kK, plan.k.map, kv_tile, head, k_batch);
    };
    const auto load_v = [&](int kv_tile) {
      load.template operator()<typename Shared::VTile>(v_ring, Shared::kV, plan.v.map, kv_tile, head, v_batch);
    };
    const auto tell_planner = [&](bool now) {
      if (now) ptx::mbarrier_arrive(shared + Shared::kLoaded);
    };
    if (tiles.begin < tiles.end) {
      load_k(tiles.end - 1);
#pragma unroll 1
      for (int kv_tile = tiles.end - 1; kv_tile > tiles.begin; kv_tile--) {
        tell_planner(kv_tile == tiles.begin + kLeft);
        load_k(kv_tile - 1), load_v(kv_tile);
      }
      load_v(tiles.begin);
    }
    tell_planner(tiles.end - tiles.begin <= kLeft || kLeft == 0);
  });
}

}  // namespace jax_flash2::cuda::sm90
