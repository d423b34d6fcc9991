// The warp of a forward's block that plans: the only one that knows the schedule. It asks for a tile when all of the one
// before is on its way: asked for earlier, long tiles would be taken by blocks that are not free yet. After a round it hands
// over again, to be done exactly, the tiles that consumers have marked.
#pragma once
#include <cstdint>

#include "core/problem.h"
#include "cuda/ptx/shared.cuh"
#include "cuda/sm90/forward_work.cuh"

namespace jax_flash2::cuda::sm90 {

__device__ __forceinline__ uint4 words(int a, int b, int c, int d) {
  return {uint32_t(a), uint32_t(b), uint32_t(c), uint32_t(d)};
}

// By a whole warp: a lane for each consumer.
template <class Config, Body kBody>
__device__ __forceinline__ void plan_tiles(const Problem& p, const ForwardPlan& plan, uint32_t shared) {
  constexpr bool kSpans = kBody != Body::kPlain;
  constexpr int kRows = Config::kTile.rows(), kKeys = Config::kTile.keys, kConsumers = Config::kTile.consumers;
  using Shared = ForwardShared<Config>;
  const int lane = threadIdx.x % 32;
  typename Shared::WorkRing ring{shared + Shared::kWorkRing};
  const auto hand_over = [&](auto&& write) {
    ring.wait_empty();
    write(shared + Shared::kWork + ring.stage * Shared::kWorkBytes, Shared::operands(shared, ring.stage));
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(ring.full());
    ring.next();
  };
  const auto hand_over_kind = [&](Work::Kind kind) {
    hand_over([&](uint32_t work, Operands*) {
      if (lane == 0) ptx::st_shared_v4(work, words(kind, 0, 0, 0));
    });
  };
  const auto plan_tile = [&](uint32_t ticket, int step, bool again) {
    const Schedule::Place place = plan.schedule.place(ticket);
    const int heads = p.N >> plan.pack_log2, q_head = place.head % heads, row0 = place.tile * kRows;
    const Batch batch = p.batch(place.head / heads);
    const Mask mask = p.mask<kSpans>(batch);
    // Where pairs may be removed nobody knows when a row has seen a key.
    const bool exactly = again || (kBody == Body::kGeneral && p.may_remove(mask));
    const auto key_tiles = [&](int first, int rows) {
      const int begin = first >> plan.pack_log2, end = ((first + rows - 1) >> plan.pack_log2) + 1;
      const int live = max_(begin, mask.live_queries().begin);
      // Asked for beside what the tiles need; a span whole, not one end after the other.
      const Range seen_first = kSpans ? mask.span_of_query(live).range() : mask.keys(live);
      Tiles tiles = mask.key_tiles(begin, min_(end, p.T), kKeys);
      // Keys of live rows that share a full tile are intervals that hold it: if the first live row has seen a key beyond
      // the full tiles, all have.
      if (tiles.full_end < tiles.end && seen_first.end <= tiles.full_end * kKeys) {
        tiles.full_end = max_(tiles.full_begin, tiles.full_end - 1);
      }
      if (exactly) tiles.full_begin = tiles.full_end = tiles.begin;
      return tiles;
    };
    // Of a consumer's rows, and, by the lane behind theirs, of all.
    const bool all = lane == kConsumers;
    Tiles tiles{};
    if (lane <= kConsumers) tiles = key_tiles(row0 + (all ? 0 : lane * 64), all ? kRows : 64);
    hand_over([&](uint32_t work, Operands* operands) {
      if (kSpans && lane == 31) {
        operands->mask = mask;
        operands->template set_head<kBody>(p, batch, q_head << plan.pack_log2);
      }
      if (lane <= kConsumers) {
        ptx::st_shared_v4(work + (all ? offsetof(Work, tiles) : sizeof(Work) + lane * sizeof(Tiles)),
                          words(tiles.begin, tiles.full_begin, tiles.full_end, tiles.end));
      }
      if (lane == 0) {
        ptx::st_shared_v4(work, words(Work::kTile, row0, mask.q_len, mask.k_len));
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

}  // namespace jax_flash2::cuda::sm90
