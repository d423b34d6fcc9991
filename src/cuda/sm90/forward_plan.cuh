// What producer, consumers and host code of the forward agree on: operands, shared memory, the steps of a block's list.
#pragma once
#include <algorithm>
#include <cstdint>

#include "core/problem.h"
#include "cuda/launch_kernel.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/sm90/config.cuh"
#include "cuda/sm90/pipeline.cuh"
#include "cuda/sm90/schedule.h"
#include "cuda/sm90/tensor_map.h"
#include "cuda/tile/shared_tile.cuh"

namespace jax_flash2::cuda::sm90 {

struct ForwardTensors {
  MappedTensor q, k, v, out;
};

inline constexpr int kMostSteps = 2048;  // of a block's list: a bit each, for tiles to be done again

// Shared memory by its offsets.
template <class Config>
struct ForwardShared {
  static constexpr ForwardTile kTile = Config::kTile;
  using QTile = tile::SharedTile<kTile.rows(), kTile.head_dim>;
  using KTile = tile::SharedTile<kTile.keys, kTile.head_dim>;
  static constexpr int kQ = 0;
  static constexpr int kK = kQ + kTile.q_buffers * QTile::kBytes;
  static constexpr int kV = kK + kTile.stages * KTile::kBytes;
  static constexpr int kOut = kTile.own_out ? kV + kTile.stages * KTile::kBytes : kQ;
  static constexpr int kQRing = kTile.buffers_bytes();
  static constexpr int kKRing = kQRing + Ring<kTile.q_buffers>::kBytes;
  static constexpr int kVRing = kKRing + Ring<kTile.stages>::kBytes;
  static constexpr int kListDone = kVRing + Ring<kTile.stages>::kBytes;  // a barrier
  static constexpr int kAgain = kListDone + 8;                           // kMostSteps bits
  static constexpr int kBytes = kAgain + (kTile.reference == Reference::kFirst ? kMostSteps / 8 : 0);
  static_assert(kBytes <= kSharedBytes && kTile.keys % 16 == 0 && kTile.rows() <= 256 && kTile.keys <= 256);
};

// One step of a block's list, as producer and consumers alike see it.
struct Step {
  int index = -1;
  bool again = false;  // the list is done, and this tile is done once more, exactly
};

template <class Config, class ListDone>
__device__ __forceinline__ bool next_step(Step& step, int steps, uint32_t shared, ListDone list_done) {
  using Shared = ForwardShared<Config>;
  step.index++;
  if constexpr (Config::kTile.reference == Reference::kFirst) {
    if (!step.again && step.index == steps) {
      list_done();
      ptx::mbarrier_wait_parity(shared + Shared::kListDone, 0);  // every warp has marked what it could not do
      step.again = true, step.index = 0;
    }
    while (step.again && step.index < steps &&
           !(ptx::ld_shared_b32(shared + Shared::kAgain + step.index / 32 * 4) >> step.index % 32 & 1)) {
      step.index++;
    }
  }
  return step.index < steps;
}

// The work of a call on the current device.
template <class Config>
Status forward_schedule(const Problem& p, Schedule* schedule) {
  constexpr int kRows = Config::kTile.rows(), kKeys = Config::kTile.keys;
  const int64_t tiles = (int64_t(p.T) + kRows - 1) / kRows, heads = int64_t(p.B) * p.N;
  if ((tiles + 1) * heads > INT32_MAX) return {"more query tiles than a CUDA grid holds"};

  // Half of L2 for K and V, the rest for what streams by.
  constexpr int kElementBytes = 2;
  const int64_t key_head_bytes = int64_t(p.S) * (p.D + p.Dv) * kElementBytes + 1;
  const int64_t key_heads = device_attribute(cudaDevAttrL2CacheSize) / 2 / key_head_bytes;
  const int64_t section = std::clamp<int64_t>(key_heads, 1, int64_t(p.B) * p.K) * p.group();

  const Mask mask = Mask::make(p.spec, p.T, p.S);
  const auto cost = [&](int64_t tile) {
    const int row0 = int(tile) * kRows;
    const Tiles met = mask.key_tiles(row0, min_(row0 + kRows, p.T), kKeys);
    return met.end - met.begin;
  };
  const bool ragged = p.extras.query_lens.present() || p.extras.key_lens.present();
  // Not the ends: a window of a few tiles leaves the first ones less to do, which a list does not notice.
  const bool even = !ragged && cost(tiles / 4) == cost(tiles / 2) && cost(tiles / 2) == cost(tiles * 3 / 4);
  *schedule = Schedule::make(uint32_t(tiles), uint32_t(heads), uint32_t(section), even,
                             uint32_t(device_attribute(cudaDevAttrMultiProcessorCount)), kMostSteps);
  return {};
}

}  // namespace jax_flash2::cuda::sm90
