// What the host decides of a call of the forward: how it is cut into tiles of a Config, in which order blocks take them, when
// that would be done, and its tensor maps. Launches nothing.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "core/problem.h"
#include "cuda/launch_kernel.cuh"
#include "cuda/sm90/forward_work.cuh"
#include "cuda/sm90/sequences.h"

namespace jax_flash2::cuda::sm90 {

// How many neighbouring heads share a tile: all that a key head's group divides into, where that leaves fewer tiles.
inline int pack_log2(const Problem& p, int rows) {
  if (p.body() >= Body::kRemoving) return 0;  // what acts on scores may differ from head to head
  const auto tiles = [&](int log2) { return ((int64_t(p.T) << log2) + rows - 1) / rows * (p.N >> log2); };
  int most = 0;
  while (most < 6 && p.group() % (2 << most) == 0) most++;
  return tiles(most) * 10 < tiles(0) * 9 ? most : 0;
}

// What tiles of a Config cost, in keys, by a sample of them: a call may have millions.
struct TileCosts {
  int64_t longest;
  bool alike;         // but for the first and the last ones: a window leaves them less to do, which nobody notices
  double of_a_block;  // of 64 rows, the mean: a consumer walks the keys of its own rows only
};

template <class Config>
TileCosts tile_costs(const Problem& p, int pack_log2) {
  constexpr int kRows = Config::kTile.rows(), kKeys = Config::kTile.keys, kSamples = 16;
  const Mask mask = Mask::make(p.spec, p.T, p.S);
  const int64_t rows = int64_t(p.T) << pack_log2, tiles = (rows + kRows - 1) / kRows, blocks = (rows + 63) / 64;
  const auto keys_met = [&](int64_t row0, int count) {
    const int64_t last = std::min(row0 + count, rows) - 1;
    const Tiles met = mask.key_tiles(int(row0 >> pack_log2), int(last >> pack_log2) + 1, kKeys);
    return int64_t(met.end - met.begin) * kKeys;
  };
  int64_t longest = keys_met((tiles - 1) * kRows, kRows), least = INT64_MAX, most = 0, sum = 0;
  for (int x = 0; x < kSamples; x++) {
    const auto sampled = [&](int64_t n) { return n * (2 * x + 1) / (2 * kSamples); };
    const int64_t tile = sampled(tiles), met = keys_met(tile * kRows, kRows);
    longest = std::max(longest, met);
    if (tile >= tiles / 4 && tile <= tiles * 3 / 4) least = std::min(least, met), most = std::max(most, met);
    sum += keys_met(sampled(blocks) * 64, 64);
  }
  return {longest, !p.ragged() && least >= most, double(sum) / kSamples};
}

// A call cut into tiles for the current device, and when it would finish.
struct Cut {
  int pack_log2;
  Schedule schedule;
  bool queued;  // blocks are to ask for their tiles
  // Until the last block is done, in (row, key) pairs of one at full rate. For the plain body, which has a choice of Configs.
  double time;
};

template <class Config>
Status cut_into_tiles(const Problem& p, Cut* cut) {
  constexpr ForwardTile kTile = Config::kTile;
  constexpr int kRows = kTile.rows();
  const int pack = pack_log2(p, kRows);
  const int64_t rows = int64_t(p.T) << pack, tiles = (rows + kRows - 1) / kRows;
  const int64_t heads = int64_t(p.B) * (p.N >> pack), sms = device_attribute(cudaDevAttrMultiProcessorCount);
  if (tiles * heads > INT32_MAX - sms) return {"more query tiles than the forward counts"};
  const int64_t workers = std::min(sms, tiles * heads), turns = (tiles * heads + workers - 1) / workers;

  const TileCosts costs = tile_costs<Config>(p, pack);
  constexpr int kTurnRound = 166;  // what a block spends between two tiles, as measured, in keys
  const double keys_of_a_tile = costs.alike ? costs.of_a_block : double(costs.longest);
  const double tile_time = kRows * (keys_of_a_tile / kTile.rate + kTurnRound);
  const double all = heads * (rows * costs.of_a_block / kTile.rate + double(tiles) * kRows * kTurnRound);
  cut->time = costs.alike ? turns * tile_time : std::max(tile_time, all / workers);

  // Tiles that cost the same stay together head by head, which spreads what comes from memory over the whole run. Others
  // are walked longest first over as many heads as have the K and V of one sequence in L2, which are to stay there. Few of
  // them need no queue, whose clearing would take longer than it saves.
  constexpr int kElementBytes = 2, kMostTogether = 16, kFewTurns = 4;
  const int64_t sequence_bytes = longest_sequence(p) * (p.D + p.Dv) * kElementBytes + 1, key_heads = int64_t(p.B) * p.K;
  const int64_t fitting = device_attribute(cudaDevAttrL2CacheSize) * int64_t(2) / 3 / sequence_bytes;
  cut->queued = !costs.alike && turns > 1 && (p.ragged() || turns > kFewTurns || fitting < key_heads);
  const int64_t most = costs.alike ? 1 : cut->queued ? std::min<int64_t>(kMostTogether, key_heads) : key_heads;
  const int64_t together = std::clamp<int64_t>(fitting, 1, most) * (p.group() >> pack);
  cut->pack_log2 = pack;
  cut->schedule = {uint32_t(tiles), uint32_t(heads), uint32_t(together), uint32_t(workers), costs.alike};
  return {};
}

template <class Config>
Status plan_forward(const Problem& p, const Cut& cut, ForwardPlan* plan) {
  using Shared = ForwardShared<Config>;
  plan->pack_log2 = cut.pack_log2, plan->schedule = cut.schedule;
  plan->queue = cut.queued ? static_cast<uint32_t*>(p.queue.data) : nullptr;
  const TensorMapEncoder encoder = find_tensor_map_encoder();
  const bool keys = p.S > 0;  // without keys K and V have no memory to point at, and nobody looks
  const int length = keys ? p.S : p.T, heads = keys ? p.K : p.N;
  const auto kv_shape = [&]<class Tile>(int head_dim) {
    return TensorMapShape{length, heads, keys ? head_dim : p.D, Tile::kPanelCols, Tile::kRows};
  };
  const TensorMapShape q_shape{p.T, p.N, p.D, Shared::QTile::kPanelCols, Shared::QTile::kRows, cut.pack_log2};
  for (const Status status :
       {encode_tensor_map(encoder, p, p.q, q_shape, &plan->q),
        encode_tensor_map(encoder, p, keys ? p.k : p.q, kv_shape.template operator()<typename Shared::KTile>(p.D),
                          &plan->k),
        encode_tensor_map(encoder, p, keys ? p.v : p.q, kv_shape.template operator()<typename Shared::VTile>(p.Dv),
                          &plan->v)}) {
    if (!status.ok()) return status;
  }
  return {};
}

}  // namespace jax_flash2::cuda::sm90
