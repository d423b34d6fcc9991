// Who feeds a block of the forward: a warp that plans, a thread that loads Q and one that loads K and V. Only the planner
// knows the schedule. It asks for a tile when all of the one before is on its way: asked for earlier, long tiles would be
// taken by blocks that are not free yet.
#pragma once
#include <cstdint>

#include "core/problem.h"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/sm90/forward_work.cuh"

namespace jax_flash2::cuda::sm90 {

__device__ __forceinline__ uint4 words(int a, int b, int c, int d) {
  return {uint32_t(a), uint32_t(b), uint32_t(c), uint32_t(d)};
}

// By a whole warp: a lane for each consumer.
template <class Config>
__device__ __forceinline__ void plan_tiles(const Problem& p, const ForwardPlan& plan, uint32_t shared) {
  constexpr int kRows = Config::kTile.rows(), kKeys = Config::kTile.keys, kConsumers = Config::kTile.consumers;
  using Shared = ForwardShared<Config>;
  const int lane = threadIdx.x % 32;
  typename Shared::WorkRing ring{shared + Shared::kWorkRing};
  const auto hand_over = [&](auto&& write) {
    ring.wait_empty();
    write(shared + Shared::kWork + ring.stage * Shared::kWorkBytes);
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(ring.full());
    ring.next();
  };
  const auto hand_over_kind = [&](Work::Kind kind) {
    hand_over([&](uint32_t work) {
      if (lane == 0) ptx::st_shared_v4(work, words(kind, 0, 0, 0));
    });
  };
  const auto plan_tile = [&](uint32_t ticket, int step, bool again) {
    const Schedule::Place place = plan.schedule.place(ticket);
    const int heads = p.N >> plan.pack_log2, q_head = place.head % heads, row0 = place.tile * kRows;
    const Batch batch = p.batch(place.head / heads);
    const Mask mask = p.mask(batch);
    const auto key_tiles = [&](int first, int rows) {
      const int begin = first >> plan.pack_log2, end = ((first + rows - 1) >> plan.pack_log2) + 1;
      Tiles tiles = mask.key_tiles(begin, min_(end, p.T), kKeys);
      // Keys of live rows that share a full tile are intervals that hold it: if the first live row has seen a key beyond
      // the full tiles, all have.
      if (tiles.full_end < tiles.end &&
          mask.keys(max_(begin, mask.live_queries().begin)).end <= tiles.full_end * kKeys) {
        tiles.full_end = max_(tiles.full_begin, tiles.full_end - 1);
      }
      if (again) tiles.full_begin = tiles.full_end = tiles.begin;  // exactly, as any other tile of keys
      return tiles;
    };
    const auto write = [](uint32_t address, const Tiles& t) {
      ptx::st_shared_v4(address, words(t.begin, t.full_begin, t.full_end, t.end));
    };
    hand_over([&](uint32_t work) {
      if (lane < kConsumers) write(work + sizeof(Work) + lane * sizeof(Tiles), key_tiles(row0 + lane * 64, 64));
      if (lane == 0) {
        ptx::st_shared_v4(work, words(Work::kTile, row0, mask.q_len, mask.k_len));
        write(work + offsetof(Work, tiles), key_tiles(row0, kRows));
        ptx::st_shared_v4(work + offsetof(Work, batch), words(batch.at[0], batch.at[1], batch.at[2], batch.at[3]));
        const int n = q_head << plan.pack_log2;
        ptx::st_shared_v4(work + offsetof(Work, q_head), words(q_head, n / p.group(), step, 0));
        ptx::st_shared_b64(work + offsetof(Work, out), uint64_t(p.out.offset(batch, n)));
        ptx::st_shared_b64(work + offsetof(Work, lse), uint64_t(p.lse.offset(batch, n)));
      }
    });
  };

  uint32_t ticket = blockIdx.x, turn = 0, loaded = 0, rounds = 0;
  const auto wait_loaded = [&] { ptx::mbarrier_wait_parity(shared + Shared::kLoaded, loaded++ % 2); };
  const auto next_ticket = [&] {
    if (!plan.queue) return plan.schedule.turn_of(blockIdx.x, ++turn);
    wait_loaded();
    const uint32_t asked = lane == 0 ? atomicAdd(plan.queue, 1u) : 0;
    return plan.schedule.workers + __shfl_sync(~0u, asked, 0);
  };
#pragma unroll 1
  while (ticket < plan.schedule.tickets()) {
    int steps = 0;
#pragma unroll 1
    for (; steps < kMostSteps && ticket < plan.schedule.tickets(); steps++) {
      if (lane == 0) ptx::st_shared_b32(shared + Shared::kTickets + steps * 4, ticket);
      plan_tile(ticket, steps, false);
      ticket = next_ticket();
    }
    hand_over_kind(Work::kRoundDone);
    ptx::mbarrier_wait_parity(shared + Shared::kRoundDone, rounds++ % 2);  // every warp has marked what it could not do
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
      const uint32_t word = shared + Shared::kAgain + step / 32 * 4, marks = ptx::ld_shared_b32(word);
      if (marks == 0) continue;
      if (marks >> step % 32 & 1) {
        plan_tile(ptx::ld_shared_b32(shared + Shared::kTickets + step * 4), step, true);
        if (plan.queue) wait_loaded();
      }
      __syncwarp();
      if (lane == 0 && (step % 32 == 31 || step == steps - 1)) ptx::st_shared_b32(word, 0);
    }
  }
  hand_over_kind(Work::kEnd);
}

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

template <class Config>
__device__ __forceinline__ void load_keys(const ForwardPlan& plan, uint32_t shared) {
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
    if (tiles.begin < tiles.end) {
      load_k(tiles.end - 1);
#pragma unroll 1
      for (int kv_tile = tiles.end - 1; kv_tile > tiles.begin; kv_tile--) load_k(kv_tile - 1), load_v(kv_tile);
      load_v(tiles.begin);
    }
    ptx::mbarrier_arrive(shared + Shared::kLoaded);
  });
}

}  // namespace jax_flash2::cuda::sm90
