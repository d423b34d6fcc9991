// What the warps of a block and host code of the backward agree on: operands, shared memory, who does what.
#pragma once
#include <algorithm>
#include <cstdint>

#include "core/problem.h"
#include "cuda/launch_kernel.cuh"
#include "cuda/sm90/backward_schedule.h"
#include "cuda/sm90/config_backward.cuh"
#include "cuda/sm90/pipeline.cuh"
#include "cuda/sm90/tensor_map.h"
#include "cuda/tile/shared_tile.cuh"

namespace jax_flash2::cuda::sm90 {

struct BackwardTensors {
  MappedTensor q, k, v, dout, dk, dv;
};

// Shared memory by its offsets.
template <class Config>
struct BackwardShared {
  static constexpr BackwardTile kTile = Config::kTile;
  static constexpr int kStages = BackwardTile::kStages, kDoutBuffers = kTile.dout_buffers;
  static constexpr int kDsBuffers = kTile.wide ? 1 : kStages, kPBuffers = kTile.wide ? 2 : 0;
  using KTile = tile::SharedTile<kTile.keys(), kTile.head_dim, kTile.panel_cols()>;   // K; V alike
  using QTile = tile::SharedTile<kTile.queries, kTile.head_dim, kTile.panel_cols()>;  // Q; dO alike
  using DsTile = tile::SharedTile<kTile.queries, kTile.keys()>;                       // dS as dQ = dS K wants it
  using PTile = tile::SharedTile<64, 64>;  // P as dV = P^T dO wants it; dS alike, of wide tiles
  using OutTile = tile::SharedTile<64, kTile.cols(), kTile.panel_cols()>;  // a warpgroup's part of dK; dV alike
  static constexpr int kRoundCols = kTile.dq_cols(0) / kTile.dq_rounds;    // of dQ
  static constexpr int kDqBytes = kTile.queries * kTile.head_dim * 4 / kTile.dq_rounds;
  static constexpr int kStatisticsBytes = 2 * kTile.queries * 4;  // of each query -lse in powers of two, and delta
  static constexpr int kK = 0;
  static constexpr int kV = kK + KTile::kBytes;
  static constexpr int kQ = kV + KTile::kBytes;
  static constexpr int kDout = kQ + kStages * QTile::kBytes;
  static constexpr int kDs = kDout + kDoutBuffers * QTile::kBytes;
  static constexpr int kP = kDs + kDsBuffers * DsTile::kBytes;  // P, then dS as dK wants it
  static constexpr int kDq = kP + kPBuffers * PTile::kBytes;
  static constexpr int kStatistics = kDq + kDqBytes;
  static constexpr int kKRing = kStatistics + kStages * kStatisticsBytes;  // K and V together
  static constexpr int kQRing = kKRing + Ring<1>::kBytes;                  // Q and the statistics
  static constexpr int kDoutRing = kQRing + Ring<kStages>::kBytes;
  static constexpr int kDqRing = kDoutRing + Ring<kDoutBuffers>::kBytes;  // one a warpgroup
  static constexpr int kTicket = kDqRing + BackwardTile::kConsumers * Ring<1>::kBytes;
  static constexpr int kBytes = kTicket + 16;
  // dK and dV on their way out take the places of others.
  static constexpr int kDkOut = kTile.wide ? kK : kDq, kDvOut = kTile.wide ? kV : kDs;
  static_assert(kBytes <= kSharedBytes);
  static_assert(BackwardTile::kConsumers * OutTile::kBytes <= (kTile.wide ? KTile::kBytes
                                                               : kDsBuffers * DsTile::kBytes < kDqBytes
                                                                   ? kDsBuffers * DsTile::kBytes
                                                                   : kDqBytes));
};

// Which block does which key tiles of which heads, in which order. The query heads of a key head are one tile's, or are
// split over `parts` of them. Key tiles of a head are next to each other, for they share Q, dO and dQ.
struct BackwardSchedule {
  FixedLists lists;  // of "heads", which are parts of key heads
  uint32_t parts;
  bool first_long;  // the first key tiles meet the most queries, not the last ones
  bool ordered;     // blocks add to dQ in turn: a tile a block, that with the lowest ticket first
  bool descending;  // ... the last keys first

  struct Place {
    int tile, part, head;  // tile -1: nothing to do; head: key head and batch row together
  };
  JAX_FLASH2_HD int64_t blocks() const { return ordered ? int64_t(lists.tiles) * lists.heads : lists.blocks(); }
  JAX_FLASH2_HD int steps(uint32_t block) const { return ordered ? 1 : lists.steps(block); }
  JAX_FLASH2_HD Place place(uint32_t block, uint32_t step) const {
    if (ordered) {
      const uint32_t tile = block % lists.tiles;
      return {int(descending ? lists.tiles - 1 - tile : tile), 0, int(block / lists.tiles)};
    }
    const FixedLists::Place at = lists.place(block, step);
    if (at.tile < 0) return {-1, 0, 0};
    return {first_long ? int(lists.tiles) - 1 - at.tile : at.tile, int(at.head % parts), int(at.head / parts)};
  }
};

// A step of a block's list: a tile of keys, and the query heads and tiles that it meets.
struct KeyTile {
  int tile, k_head, n_begin, n_end;
  Batch b;
  Mask mask;
  Tiles tiles;

  // False: nothing to do, for anybody.
  template <int kKeys, int kQueries>
  __device__ __forceinline__ bool find(const Problem& p, const BackwardSchedule& schedule, uint32_t block, int step) {
    const BackwardSchedule::Place place = schedule.place(block, step);
    if (place.tile < 0) return false;
    tile = place.tile, k_head = place.head % p.K;
    const int heads_of_part = (p.group() + int(schedule.parts) - 1) / int(schedule.parts);
    n_begin = k_head * p.group() + place.part * heads_of_part;
    n_end = min_(n_begin + heads_of_part, (k_head + 1) * p.group());
    b = p.batch(place.head / p.K);
    mask = p.mask(b);
    tiles = mask.query_tiles(tile * kKeys, tile * kKeys + kKeys, kQueries);
    return true;
  }
};

// The work of a call on the current device.
template <class Config>
Status backward_schedule(const Problem& p, BackwardSchedule* schedule) {
  constexpr int kKeys = Config::kTile.keys(), kQueries = Config::kTile.queries;
  const int64_t tiles = (int64_t(p.S) + kKeys - 1) / kKeys, heads = int64_t(p.B) * p.K;
  const int64_t resident = device_attribute(cudaDevAttrMultiProcessorCount);
  int64_t parts = 1;
  if (p.dk_acc.present() && p.dv_acc.present() && !p.spec.deterministic && tiles * heads < resident) {
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
  const bool ragged = p.extras.query_lens.present() || p.extras.key_lens.present();
  const bool even = !ragged && cost(tiles / 4) == cost(tiles / 2) && cost(tiles / 2) == cost(tiles * 3 / 4);
  constexpr uint32_t kMostSteps = 1 << 30;
  schedule->lists = FixedLists::make(uint32_t(tiles), uint32_t(heads * parts), 1, even, uint32_t(resident), kMostSteps);
  schedule->parts = uint32_t(parts);
  schedule->first_long = cost(0) > cost(tiles - 1);
  schedule->ordered = p.spec.deterministic;
  schedule->descending = p.spec.window_right >= 0;  // under a causal mask the last keys are first at any query
  return {};
}

}  // namespace jax_flash2::cuda::sm90
