// What the roles of the forward's blocks agree on: operands, shared memory, and what they are told of a tile of queries.
//
// A row of a tile is a query of one head, or, where heads are packed, row r is query r >> pack_log2 of head
// r % (1 << pack_log2) of 1 << pack_log2 neighbours: query heads of one key head read the same K and V, so a few queries
// of each fill a tile together.
#pragma once
#include <cstddef>
#include <cstdint>

#include "core/problem.h"
#include "cuda/operands.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/sm90/config.cuh"
#include "cuda/sm90/pipeline.cuh"
#include "cuda/sm90/schedule.h"
#include "cuda/sm90/tensor_map.h"
#include "cuda/tile/shared_tile.cuh"

namespace jax_flash2::cuda::sm90 {

struct ForwardPlan {
  MappedTensor q, k, v;
  Schedule schedule;
  uint32_t* queue;  // how many tickets have been asked for; null: a block's tickets are `workers` apart
  int pack_log2;
};

// A tile of queries, as the planner hands it to loaders and consumers. Only the planner knows the schedule: its divisions
// would delay the others at each tile.
struct Work {
  enum Kind { kTile, kRoundDone, kEnd };
  int kind, row0, q_len, k_len;
  Tiles tiles;  // of keys that any consumer needs
  Batch batch;
  int q_head, kv_head, step, unused;  // q_head: where heads are packed, of the packed ones
  int64_t out, lse;                   // offsets of the first query's element of (the first) head
  // and, after it, for each consumer the tiles of keys that it needs, full ones only where every live row has seen a key
};
static_assert(sizeof(Work) == 80 && offsetof(Work, tiles) == 16 && offsetof(Work, out) == 64);

__device__ __forceinline__ Tiles read_tiles(uint32_t address) {
  const uint4 x = ptx::ld_shared_v4(address);
  return {int(x.x), int(x.y), int(x.z), int(x.w)};
}
__device__ __forceinline__ Batch read_batch(uint32_t work) {
  const uint4 x = ptx::ld_shared_v4(work + offsetof(Work, batch));
  return {int(x.x), int(x.y), int(x.z), int(x.w)};
}

inline constexpr int kMostSteps = 256;  // of a round, after which tiles that `fast` could not do are done again

// Shared memory by its offsets.
template <class Config>
struct ForwardShared {
  static constexpr ForwardTile kTile = Config::kTile;
  using QTile = tile::SharedTile<64, kTile.head_dim>;  // of one consumer
  using KTile = tile::SharedTile<kTile.keys, kTile.head_dim>;
  using VTile = tile::SharedTile<kTile.keys, kTile.value_dim>;
  static constexpr int kWorks = 4;
  static constexpr int kWorkBytes = sizeof(Work) + kTile.consumers * sizeof(Tiles);
  static constexpr int kOperandsBytes =
      (sizeof(Operands) + 15) / 16 * 16;  // of a work, for all bodies but the plain one
  using QRing = Ring<kTile.q_buffers>;
  using KRing = Ring<kTile.stages>;
  using VRing = Ring<kTile.stages>;
  using WorkRing = Ring<kWorks>;

  static constexpr int kQ = 0;  // a consumer's buffers lie together
  static constexpr int kK = kQ + kTile.consumers * kTile.q_buffers * QTile::kBytes;
  static constexpr int kV = kK + kTile.stages * KTile::kBytes;
  static constexpr int kQRings = kV + kTile.stages * VTile::kBytes;
  static constexpr int kKRing = kQRings + kTile.consumers * QRing::kBytes;
  static constexpr int kVRing = kKRing + KRing::kBytes;
  static constexpr int kWorkRing = kVRing + VRing::kBytes;
  static constexpr int kWork = kWorkRing + WorkRing::kBytes;
  static constexpr int kOperands = kWork + kWorks * kWorkBytes;
  static constexpr int kTickets = kOperands + kWorks * kOperandsBytes;  // of the round's steps
  static constexpr int kAgain = kTickets + kMostSteps * 4;              // a bit each
  static constexpr int kRoundDone = kAgain + kMostSteps / 8;            // barriers
  static constexpr int kLoaded = kRoundDone + 8;
  static constexpr int kBytes = kLoaded + 8;
  static_assert(kBytes <= kSharedBytes && kTile.keys % 16 == 0 && kTile.keys <= 256);

  static __device__ __forceinline__ Operands* operands(uint32_t shared, int stage) {
    return static_cast<Operands*>(__cvta_shared_to_generic(shared + kOperands + stage * kOperandsBytes));
  }
  static constexpr int q(int consumer) { return kQ + consumer * kTile.q_buffers * QTile::kBytes; }
  static constexpr int q_ring(int consumer) { return kQRings + consumer * QRing::kBytes; }

  static __device__ __forceinline__ void init_barriers(uint32_t shared) {
    constexpr int kWarps = kTile.consumers * 4, kLoaders = 2;
    for (int c = 0; c < kTile.consumers; c++) QRing{shared + q_ring(c)}.init(4);
    KRing{shared + kKRing}.init(kWarps);
    VRing{shared + kVRing}.init(kWarps);
    WorkRing{shared + kWorkRing}.init(kWarps + kLoaders);
    ptx::mbarrier_init(shared + kRoundDone, kWarps);
    ptx::mbarrier_init(shared + kLoaded, 1);
    ptx::fence_mbarrier_init();
  }
};

}  // namespace jax_flash2::cuda::sm90
