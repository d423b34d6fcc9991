// What the warps of a block and host code of the backward agree on: operands, shared memory, who does what.
#pragma once
#include <algorithm>
#include <cstdint>

#include "core/problem.h"
#include "cuda/backward_operands.cuh"
#include "cuda/launch_kernel.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/sm90/backward_schedule.h"
#include "cuda/sm90/config_backward.cuh"
#include "cuda/sm90/pipeline.cuh"
#include "cuda/sm90/sequences.h"
#include "cuda/sm90/tensor_map.h"
#include "cuda/tile/shared_tile.cuh"

namespace jax_flash2::cuda::sm90 {

struct BackwardTensors {
  MappedTensor q, k, v, dout, dk, dv;
  MappedTensor out;  // for chores
};

// Shared memory by its offsets.
template <class Config>
struct BackwardShared {
  static constexpr BackwardTile kTile = Config::kTile;
  static constexpr int kStages = BackwardTile::kStages, kDoutBuffers = kTile.dout_buffers;
  static constexpr int kDsBuffers = kTile.wide ? 1 : kStages, kPBuffers = kTile.wide ? 2 : 0;
  static constexpr int kKeyPanel = BackwardTile::panel_cols(kTile.key_cols());
  static constexpr int kValuePanel = BackwardTile::panel_cols(kTile.value_cols());
  using KTile = tile::SharedTile<kTile.keys(), kTile.head_dim, kKeyPanel>;
  using VTile = tile::SharedTile<kTile.keys(), kTile.value_dim, kValuePanel>;
  using QTile = tile::SharedTile<kTile.queries, kTile.head_dim, kKeyPanel>;
  using DoutTile = tile::SharedTile<kTile.queries, kTile.value_dim, kValuePanel>;
  using DsTile = tile::SharedTile<kTile.queries, kTile.keys()>;  // dS as dQ = dS K wants it
  using PTile = tile::SharedTile<64, 64>;                        // P as dV = P^T dO wants it; dS alike, of wide tiles
  using DkTile = tile::SharedTile<64, kTile.key_cols(), kKeyPanel>;  // a warpgroup's part
  using DvTile = tile::SharedTile<64, kTile.value_cols(), kValuePanel>;
  static constexpr int kRoundCols = kTile.dq_cols(0) / kTile.dq_rounds;  // of dQ
  static constexpr int kDqBytes = kTile.queries * kTile.head_dim * 4 / kTile.dq_rounds;
  static constexpr int kStatisticsBytes = 2 * kTile.queries * 4;  // of each query -lse and delta
  static constexpr int kK = 0;
  static constexpr int kV = kK + KTile::kBytes;
  static constexpr int kQ = kV + VTile::kBytes;
  static constexpr int kDout = kQ + kStages * QTile::kBytes;
  static constexpr int kDs = kDout + kDoutBuffers * DoutTile::kBytes;
  static constexpr int kP = kDs + kDsBuffers * DsTile::kBytes;  // P, then dS as dK wants it
  static constexpr int kDq = kP + kPBuffers * PTile::kBytes;
  static constexpr int kStatistics = kDq + kDqBytes;
  static constexpr int kKRing = kStatistics + kStages * kStatisticsBytes;  // K and V together
  static constexpr int kQRing = kKRing + Ring<1>::kBytes;                  // Q and the statistics
  static constexpr int kDoutRing = kQRing + Ring<kStages>::kBytes;
  static constexpr int kDqRing = kDoutRing + Ring<kDoutBuffers>::kBytes;  // one a warpgroup
  static constexpr int kPlans = 2, kPlanBytes = 80;
  static constexpr int kPlanRing = kDqRing + BackwardTile::kConsumers * Ring<1>::kBytes;
  static constexpr int kChoreRing = kPlanRing + Ring<kPlans>::kBytes;
  static constexpr int kPlan = kChoreRing + Ring<1>::kBytes;
  static constexpr int kOperands = kPlan + kPlans * kPlanBytes;  // of each warpgroup, of bodies that have any
  static constexpr int kOperandsBytes = (sizeof(BackwardOperands) + 15) / 16 * 16;
  static constexpr int kEnd = kOperands + BackwardTile::kConsumers * kOperandsBytes;
  // A tile of out and one of dO, or one of dQ, where there is room for them.
  static constexpr int kChores = (kEnd + 1023) / 1024 * 1024;
  static constexpr int kChoreBytes = std::max(2 * DoutTile::kBytes, kTile.queries* kTile.head_dim * 4);
  static constexpr bool kHasChores = kChores + kChoreBytes <= kSharedBytes;
  static constexpr int kBytes = kHasChores ? kChores + kChoreBytes : kEnd;
  // dK and dV on their way out take the places of others.
  static constexpr int kDkOut = kTile.wide ? kK : kDq, kDvOut = kTile.wide ? kV : kDs;
  static_assert(kBytes <= kSharedBytes);
  static_assert(BackwardTile::kConsumers * DkTile::kBytes <= (kTile.wide ? KTile::kBytes : kDqBytes));
  static_assert(BackwardTile::kConsumers * DvTile::kBytes <=
                (kTile.wide ? VTile::kBytes : kDsBuffers * DsTile::kBytes));
};

// Which block does which key tiles of which heads, in which order. The query heads of a key head are one tile's, or are
// split over `parts` of them. Key tiles of a head are next to each other, for they share Q, dO and dQ.
struct BackwardSchedule {
  FixedLists lists;     // of "heads", which are parts of key heads
  Sequences sequences;  // whose tiles are drawn
  uint32_t parts;
  uint32_t resident;  // blocks that the device runs at once
  bool first_long;    // the first key tiles meet the most queries, not the last ones
  bool ordered;       // blocks add to dQ in turn: a tile a block, that with the lowest ticket first,
  bool descending;    // the last keys first
  bool drawn;         // blocks stay and draw a tile after the other
  bool chores;        // blocks do what else would be kernels before and after this one

  struct Place {
    int tile, part, head;  // tile -1: nothing to do; head: key head and batch row together
    bool ends_unit;        // the last tile of a list's unit
  };
  JAX_FLASH2_HD uint32_t tickets() const { return lists.tiles * lists.heads; }
  JAX_FLASH2_HD int64_t blocks() const { return ordered ? tickets() : lists.blocks(); }
  JAX_FLASH2_HD int steps(uint32_t block) const { return ordered ? 1 : lists.steps(block); }
  // Warps that add dQ to memory: one a warpgroup, where no other has the chores.
  JAX_FLASH2_HD int drains() const { return chores ? 1 : BackwardTile::kConsumers; }
  JAX_FLASH2_HD bool waits() const { return chores && !drawn; }  // blocks for all others
  JAX_FLASH2_HD ChoreQueue chore_queue() const {
    return ChoreQueue::make(lists.units(), lists.units_of_head(), resident);
  }
  template <bool kSpans>
  JAX_FLASH2_HD Place drawn_place(uint32_t ticket) const {
    const uint32_t head = ticket / lists.tiles, x = ticket % lists.tiles;
    const bool last = kSpans && head == lists.heads - 1;  // after which blocks have nothing to do while others do
    return turned({int(lists.tiles - 1 - (last ? sequences.tile(x) : x)), int(head), true});
  }
  // A step of a block's list, or what a ticket of an ordered call stands for.
  JAX_FLASH2_HD Place place(uint32_t unit, int step) const {
    if (ordered) {
      const uint32_t tile = unit % lists.tiles;
      return {int(descending ? lists.tiles - 1 - tile : tile), 0, int(unit / lists.tiles), true};
    }
    const FixedLists::Place at = lists.place(unit, step);
    return at.tile < 0 ? Place{-1, 0, 0, false} : turned(at);
  }

 private:
  // The long tiles are the last ones of lists.
  JAX_FLASH2_HD Place turned(const FixedLists::Place& at) const {
    return {first_long ? int(lists.tiles) - 1 - at.tile : at.tile, int(at.head % parts), int(at.head / parts),
            at.ends_unit};
  }
};

// A tile of keys, and the query heads and tiles that it meets.
struct KeyTile {
  int tile, batch_row, k_head, n_begin, n_end;
  Batch b;
  Mask mask;
  Tiles tiles;
  int ends_unit;

  template <int kKeys, int kQueries, bool kSpans>
  __device__ __forceinline__ void find(const Problem& p, const BackwardSchedule& schedule,
                                       const BackwardSchedule::Place& place) {
    ends_unit = place.ends_unit, tile = place.tile, k_head = place.head % p.K, batch_row = place.head / p.K;
    const int heads_of_part = (p.group() + int(schedule.parts) - 1) / int(schedule.parts);
    n_begin = k_head * p.group() + place.part * heads_of_part;
    n_end = min_(n_begin + heads_of_part, (k_head + 1) * p.group());
    b = p.batch(batch_row);
    mask = p.mask<kSpans>(b);
    tiles = mask.query_tiles(tile * kKeys, tile * kKeys + kKeys, kQueries);
    // A tile with queries that are dead, or do not exist, is done as a masked one, which knows what to do with them.
    const Range live = mask.live_queries();  // with spans, of which dead ones break full tiles, all
    tiles.full_begin = clamp_((live.begin + kQueries - 1) / kQueries, tiles.full_begin, tiles.full_end);
    tiles.full_end = clamp_(live.end / kQueries, tiles.full_begin, tiles.full_end);
  }
};

// How far the blocks are with a key head's chores. The two counters are its first query head's.
struct HeadCounters {
  int *prepared, *added;

  __device__ __forceinline__ HeadCounters(const Problem& p, int batch_row, int k_head)
      : prepared(p.counter(HeadCounter::kPrepared, batch_row, k_head * p.group())),
        added(p.counter(HeadCounter::kAdded, batch_row, k_head * p.group())) {}

  // By whole warps: what was written for the head before can be read, and added to.
  __device__ __forceinline__ void wait_prepared(int units) const { wait(prepared, units); }
  __device__ __forceinline__ void wait_added(int units) const { wait(added, units); }
  __device__ __forceinline__ void tell_prepared() const {
    ptx::fence_proxy_async_global();
    __threadfence();
    __syncwarp();
    if (threadIdx.x % 32 == 0) atomicAdd(prepared, 1);
  }
  // By the thread that has waited for its additions.
  __device__ __forceinline__ void tell_added() const {
    ptx::fence_proxy_async_global();
    __threadfence();
    atomicAdd(added, 1);
  }

 private:
  static __device__ __forceinline__ void wait(const int* counter, int count) {
    while (*reinterpret_cast<const volatile int*>(counter) < count) __nanosleep(20);
    __threadfence();
    ptx::fence_proxy_async_global();
  }
};

// A block's key tiles, one after another. The one thread that loads finds each, and publishes it for the other warps.
template <class Config, bool kSpans>
struct Plans {
  using Shared = BackwardShared<Config>;
  // Warps that read plans: one that brings statistics, `drains`, and those that compute.
  static constexpr int readers(int drains) { return 1 + drains + BackwardTile::kConsumers * 4; }

  uint32_t shared;
  Ring<Shared::kPlans> ring;

  __device__ __forceinline__ explicit Plans(uint32_t shared) : shared(shared), ring{shared + Shared::kPlanRing} {}

  __device__ __forceinline__ void publish(const KeyTile& at) {
    ring.wait_empty();
    const uint32_t to = slot();
    const auto put = [&](int x, int a, int b, int c, int d) {
      ptx::st_shared_v4(to + x * 16, {uint32_t(a), uint32_t(b), uint32_t(c), uint32_t(d)});
    };
    put(0, at.tile, at.mask.q_len, at.mask.k_len, at.mask.left);
    put(1, at.mask.right, at.mask.off, at.batch_row, at.k_head);
    put(2, at.tiles.begin, at.tiles.full_begin, at.tiles.full_end, at.tiles.end);
    put(3, at.n_begin, at.n_end, at.b.at[0], at.b.at[1]);
    put(4, at.b.at[2], at.b.at[3], at.ends_unit, int(at.mask.flags()));
    ptx::mbarrier_arrive(ring.full());
    ring.next();
  }
  // By whole warps, like what follows. False: there is none left.
  __device__ __forceinline__ bool next() const {
    ring.wait_full();
    return int(ptx::ld_shared_b32(slot())) >= 0;
  }
  __device__ __forceinline__ KeyTile current(const Problem& p) const {
    const uint4 c = get(1), d = get(3), e = get(4);
    return {tile(), int(c.z), int(c.w), int(d.x), int(d.y), batch(), mask(p), tiles(), int(e.z)};
  }
  // What a masked step asks for, and no more.
  __device__ __forceinline__ int tile() const { return int(ptx::ld_shared_b32(slot())); }
  __device__ __forceinline__ Mask mask(const Problem& p) const {
    const uint4 a = get(0);
    Mask m{int(a.y), int(a.z), int(a.w), int(ptx::ld_shared_b32(slot() + 16)), int(ptx::ld_shared_b32(slot() + 20))};
    m = m.with_flags(ptx::ld_shared_b32(slot() + 4 * 16 + 12));
    return kSpans && p.has_spans() ? p.with_spans(m, batch()) : m;
  }
  __device__ __forceinline__ Batch batch() const {
    const uint4 d = get(3);
    return {int(d.z), int(d.w), int(ptx::ld_shared_b32(slot() + 64)), int(ptx::ld_shared_b32(slot() + 68))};
  }
  __device__ __forceinline__ Tiles tiles() const {
    const uint4 x = get(2);
    return {int(x.x), int(x.y), int(x.z), int(x.w)};
  }
  __device__ __forceinline__ int n_end() const { return int(ptx::ld_shared_b32(slot() + 3 * 16 + 4)); }
  __device__ __forceinline__ void done() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) ring.release();
    ring.next();
  }

 private:
  static_assert(kMaxBatchAxes == 4);
  __device__ __forceinline__ uint4 get(int x) const { return ptx::ld_shared_v4(slot() + x * 16); }
  __device__ __forceinline__ uint32_t slot() const { return shared + Shared::kPlan + ring.stage * Shared::kPlanBytes; }
};

inline constexpr int kFewestForChores = 768, kMostKeysForLists = 8192;
static_assert(int(HeadCounter::kChores) < order_turns(kFewestForChores));  // a head has its counters

// The work of a call on the current device.
template <class Config>
Status backward_schedule(const Problem& p, BackwardSchedule* schedule) {
  constexpr int kKeys = Config::kTile.keys(), kQueries = Config::kTile.queries;
  const int64_t tiles = (int64_t(p.S) + kKeys - 1) / kKeys, heads = int64_t(p.B) * p.K;
  const int64_t resident = device_attribute(cudaDevAttrMultiProcessorCount);
  int64_t parts = 1;
  if (p.T > 0 && p.dk_acc.present() && p.dv_acc.present() && !p.spec.deterministic && tiles * heads < resident) {
    parts = std::min<int64_t>((resident + tiles * heads - 1) / (tiles * heads), p.group());
    const int64_t heads_of_part = (p.group() + parts - 1) / parts;
    parts = (p.group() + heads_of_part - 1) / heads_of_part;  // no part without a head
  }
  if ((tiles + 1) * heads * parts > INT32_MAX) return {"more key tiles than a CUDA grid holds"};

  const Mask mask = Mask::make(p.spec, p.T, p.S);
  const auto cost = [&](int64_t tile) {
    const Tiles met = mask.query_tiles(int(tile) * kKeys, int(tile) * kKeys + kKeys, kQueries);
    return met.end - met.begin;
  };
  const bool even = !p.ragged() && cost(tiles / 4) == cost(tiles / 2) && cost(tiles / 2) == cost(tiles * 3 / 4);
  schedule->parts = uint32_t(parts), schedule->resident = uint32_t(resident);
  schedule->first_long = p.has_spans() || cost(0) > cost(tiles - 1);
  schedule->ordered = p.spec.deterministic && p.T > 0;  // without queries nobody adds, or has cleared the tickets
  // Under a causal mask, which spans may be, the last keys are first at any query.
  schedule->descending = p.spec.window_right >= 0 || p.has_spans();
  // Where tiles of keys meet few queries the products are done before the chores. They meet about as many queries as the
  // longest span has keys, and at most twice as many as the middle tile, which under a causal mask meets half of all.
  // The chores leave out what delta.cuh knows of sinks.
  const int64_t met = std::min<int64_t>({p.T, longest_sequence(p), 2 * cost(tiles / 2) * kQueries});
  // Else `order` is absent, not cleared, or holds turns.
  const bool counts = p.order.present() && p.T > 0 && !schedule->ordered;
  schedule->chores =
      BackwardShared<Config>::kHasChores && counts && parts == 1 && met >= kFewestForChores && !p.grads.sinks.present();
  // Lists are done sooner where it is known what tiles cost, but with chores their blocks wait for each other, and a head's
  // tiles must be done in few steps.
  const bool listed = !p.has_spans() && p.S <= kMostKeysForLists && tiles <= resident &&
                      device_attribute(cudaDevAttrCooperativeLaunch) != 0;
  schedule->drawn = counts && (schedule->chores ? !listed : p.has_spans());
  schedule->sequences = Sequences::make(p, tiles);
  schedule->lists = FixedLists::make(uint32_t(tiles), uint32_t(heads * parts), even || schedule->drawn,
                                     uint32_t(resident), schedule->waits());
  return {};
}

}  // namespace jax_flash2::cuda::sm90
