// What the host decides of a call of the forward: how it is cut into tiles of a Config, in which order blocks take them, when
// that would be done, and its tensor maps. Launches nothing.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "core/problem.h"
#include "cuda/launch_kernel.cuh"
#include "cuda/sm90/forward_work.cuh"

namespace jax_flash2::cuda::sm90 {

// How many neighbouring heads share a tile: all that a key head's group divides into, where that leaves fewer tiles.
inline int pack_log2(const Problem& p, int rows) {
  if (!p.plain()) return 0;  // what acts on scores may differ from head to head
  const auto tiles = [&](int log2) { return ((int64_t(p.T) << log2) + rows - 1) / rows * (p.N >> log2); };
  int most = 0;
  while (most < 6 && p.group() % (2 << most) == 0) most++;
  return tiles(most) * 10 < tiles(0) * 9 ? most : 0;
}

// A call cut into tiles for the current device, and when it would finish.
struct Cut {
  int pack_log2;
  Schedule schedule;
  bool queued;  // blocks are to ask for their tiles
  double time;  // until the last block is done, in (row, key) pairs of one at full rate
};

template <class Config>
Status cut_into_tiles(const Problem& p, Cut* cut) {
  constexpr ForwardTile kTile = Config::kTile;
  constexpr int kRows = kTile.rows(), kKeys = kTile.keys;
  // What a block spends between two tiles, as measured: in keys of a tile.
  constexpr int kTurnRound = 166;
  const int pack = pack_log2(p, kRows);
  const int64_t rows = int64_t(p.T) << pack, tiles = (rows + kRows - 1) / kRows;
  const int64_t heads = int64_t(p.B) * (p.N >> pack), sms = device_attribute(cudaDevAttrMultiProcessorCount);
  if (tiles * heads > INT32_MAX - sms) return {"more query tiles than the forward counts"};
  const int64_t workers = std::min(sms, tiles * heads);

  const Mask mask = Mask::make(p.spec, p.T, p.S);
  const auto keys_met = [&](int64_t row0, int rows_met) {
    const int64_t last = std::min(row0 + rows_met, rows) - 1;
    const Tiles met = mask.key_tiles(int(row0 >> pack), int(last >> pack) + 1, kKeys);
    return int64_t(met.end - met.begin) * kKeys;
  };
  // A sample of tiles tells whether they are alike and how long the longest is. The first and the last ones do not count
  // for the former: a window leaves them less to do, which nobody notices. A consumer walks the keys of its own rows only.
  constexpr int kSamples = 16;
  int64_t longest = keys_met((tiles - 1) * kRows, kRows), least = INT64_MAX, most = 0, sum = 0;
  for (int x = 0; x < kSamples; x++) {
    const int64_t tile = tiles * (2 * x + 1) / (2 * kSamples), met = keys_met(tile * kRows, kRows);
    longest = std::max(longest, met);
    if (tile >= tiles / 4 && tile <= tiles * 3 / 4) least = std::min(least, met), most = std::max(most, met);
    const int64_t blocks = (rows + 63) / 64;
    sum += keys_met(blocks * (2 * x + 1) / (2 * kSamples) * 64, 64);
  }
  const bool ragged = p.extras.query_lens.present() || p.extras.key_lens.present();
  const bool even = !ragged && least >= most;

  const double tile_time = kRows * (longest / kTile.rate + kTurnRound);
  const double all = heads * (double(rows) * sum / kSamples / kTile.rate + double(tiles) * kRows * kTurnRound);
  const int64_t turns = (tiles * heads + workers - 1) / workers;
  cut->time = even ? turns * tile_time : std::max(tile_time, all / workers);

  // Tiles that cost the same stay together head by head, which spreads what comes from memory over the whole run. Others
  // are walked longest first over as many heads as fit L2, for K and V are to stay there. Few of them need no queue, whose
  // clearing would take longer than it saves.
  constexpr int kElementBytes = 2, kMostTogether = 16, kFewTurns = 4;
  const int64_t key_head_bytes = int64_t(p.S) * (p.D + p.Dv) * kElementBytes + 1, key_heads = int64_t(p.B) * p.K;
  const int64_t fitting = device_attribute(cudaDevAttrL2CacheSize) * int64_t(2) / 3 / key_head_bytes;
  cut->queued = !even && turns > 1 && (ragged || turns > kFewTurns || fitting < key_heads);
  const int64_t most_together = even ? 1 : std::min<int64_t>(cut->queued ? kMostTogether : key_heads, key_heads);
  const int64_t together = std::clamp<int64_t>(fitting, 1, most_together);
  cut->pack_log2 = pack;
  cut->schedule = {uint32_t(tiles), uint32_t(heads), uint32_t(together * (p.group() >> pack)), uint32_t(workers), even};
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
