// The forward pass on wgmma and TMA (compute capability 9.0): its kernel, whose blocks stay and take one tile of queries
// after the other, and the launch. One warpgroup feeds (forward_producer.cuh), two to four compute (forward_consumer.cuh).
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "core/problem.h"
#include "cuda/launch_kernel.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/sm90/forward_consumer.cuh"
#include "cuda/sm90/forward_producer.cuh"
#include "cuda/sm90/forward_work.cuh"

namespace jax_flash2::cuda::sm90 {

template <class Config, class Element, bool kPlain>
__global__ void __launch_bounds__(Config::kTile.threads(), 1)
    forward_kernel(const __grid_constant__ Problem p, const __grid_constant__ ForwardPlan plan) {
  constexpr ForwardTile kTile = Config::kTile;
  using Shared = ForwardShared<Config>;
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  const uint32_t shared = ptx::shared_address(shared_memory);
  if (threadIdx.x == 0) Shared::init_barriers(shared);
  for (int x = threadIdx.x; x < kMostSteps / 32; x += kTile.threads()) {
    ptx::st_shared_b32(shared + Shared::kAgain + x * 4, 0);
  }
  __syncthreads();  // barriers and marks are there

  const int warp = __shfl_sync(~0u, int(threadIdx.x / 32), 0);
  if (warp >= 4) {
    ptx::setmaxnreg_inc<kTile.consumer_registers()>();
    consume<Config, Element, kPlain>(p, plan.pack_log2, shared, warp / 4 - 1);
    return;
  }
  ptx::setmaxnreg_dec<kTile.producer_registers()>();
  if (warp == 0 && ptx::elect_sync()) load_keys<Config>(plan, shared);
  if (warp == 1) plan_tiles<Config>(p, plan, shared);
  if (warp == 2 && ptx::elect_sync()) load_queries<Config>(plan, shared);
}

// How many neighbouring heads share a tile: all that a key head's group divides into, where that leaves fewer tiles.
inline int pack_log2(const Problem& p, int rows) {
  if (!p.plain()) return 0;  // what acts on scores may differ from head to head
  const auto tiles = [&](int log2) { return ((int64_t(p.T) << log2) + rows - 1) / rows * (p.N >> log2); };
  int most = 0;
  while (most < 6 && p.group() % (2 << most) == 0) most++;
  return tiles(most) * 10 < tiles(0) * 9 ? most : 0;
}

// The work of a call on the current device, and whether blocks that take every workers-th tile finish together.
template <class Config>
Status forward_schedule(const Problem& p, int pack_log2, Schedule* schedule, bool* fair) {
  constexpr int kRows = Config::kTile.rows(), kKeys = Config::kTile.keys;
  const int64_t rows = int64_t(p.T) << pack_log2, tiles = (rows + kRows - 1) / kRows;
  const int64_t heads = int64_t(p.B) * (p.N >> pack_log2), workers = device_attribute(cudaDevAttrMultiProcessorCount);
  if (tiles * heads > INT32_MAX - workers) return {"more query tiles than the forward counts"};

  const Mask mask = Mask::make(p.spec, p.T, p.S);
  const auto cost = [&](int64_t tile) {
    const int64_t row0 = tile * kRows, last = std::min(row0 + kRows, rows) - 1;
    const Tiles met = mask.key_tiles(int(row0 >> pack_log2), int(last >> pack_log2) + 1, kKeys);
    return met.end - met.begin;
  };
  const bool ragged = p.extras.query_lens.present() || p.extras.key_lens.present();
  // Not the ends: a window of a few tiles leaves the first ones less to do, which nobody notices.
  const bool even = !ragged && cost(tiles / 4) == cost(tiles / 2) && cost(tiles / 2) == cost(tiles * 3 / 4);

  // Tiles that cost the same stay together head by head, which spreads what comes from memory over the whole run. Others
  // are walked longest first over as many heads as fit L2, for K and V are to stay there.
  constexpr int kElementBytes = 2, kMostTogether = 16;
  const int64_t key_head_bytes = int64_t(p.S) * (p.D + p.Dv) * kElementBytes + 1;
  const int64_t fitting = device_attribute(cudaDevAttrL2CacheSize) * int64_t(2) / 3 / key_head_bytes;
  const int64_t together =
      even ? 1 : std::clamp<int64_t>(fitting, 1, std::min<int64_t>(kMostTogether, int64_t(p.B) * p.K));
  *fair = even;
  *schedule = {uint32_t(tiles), uint32_t(heads), uint32_t(together * (p.group() >> pack_log2)),
               uint32_t(std::min(workers, tiles * heads))};
  return {};
}

template <class Config>
Status plan_forward(const Problem& p, ForwardPlan* plan) {
  using Shared = ForwardShared<Config>;
  plan->pack_log2 = pack_log2(p, Config::kTile.rows());
  bool fair;
  if (const Status status = forward_schedule<Config>(p, plan->pack_log2, &plan->schedule, &fair); !status.ok()) {
    return status;
  }
  const bool queued = p.queue.present() && !fair && plan->schedule.tickets() > plan->schedule.workers;
  plan->queue = queued ? static_cast<uint32_t*>(p.queue.data) : nullptr;
  const TensorMapEncoder encoder = find_tensor_map_encoder();
  const bool keys = p.S > 0;  // without keys K and V have no memory to point at, and nobody looks
  const int length = keys ? p.S : p.T, heads = keys ? p.K : p.N;
  const auto kv_shape = [&]<class Tile>(int head_dim) {
    return TensorMapShape{length, heads, head_dim, Tile::kPanelCols, Tile::kRows};
  };
  TensorMapShape q_shape{p.T, p.N, p.D, Shared::QTile::kPanelCols, Shared::QTile::kRows};
  q_shape.pack_log2 = plan->pack_log2, q_shape.packed = true;
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

// Enqueues one body; the other need not exist.
template <class Config, class Element, bool kPlain>
Status launch_forward(const Problem& p, const ForwardPlan& plan, cudaStream_t stream) {
  if (plan.queue) {
    const cudaError_t error = cudaMemsetAsync(plan.queue, 0, sizeof(*plan.queue), stream);
    if (error != cudaSuccess) return {cudaGetErrorString(error)};
  }
  return launch_kernel(forward_kernel<Config, Element, kPlain>, plan.schedule.workers, Config::kTile.threads(),
                       ForwardShared<Config>::kBytes, stream, p, plan);
}

template <class Config, class Element, bool kPlain>
Status forward_with(const Problem& p, cudaStream_t stream) {
  ForwardPlan plan;
  if (const Status status = plan_forward<Config>(p, &plan); !status.ok()) return status;
  return launch_forward<Config, Element, kPlain>(p, plan, stream);
}

// Whether tiles of fewer rows serve a plain call better: one without a mask, of which they fill the last tile more.
inline bool fewer_rows_fit(const Problem& p, int rows, int fewer) {
  const auto padded = [&](int r) { return (int64_t(p.T) + r - 1) / r * r; };
  return Mask::make(p.spec, p.T, p.S).keys(0).end == p.S && padded(rows) * 16 > padded(fewer) * 17;
}

// The entry point that generated units instantiate: heads of up to kHeadDim columns.
template <class Element, int kHeadDim>
Status forward(const Problem& p, cudaStream_t stream) {
  using Config = ForwardConfig<kHeadDim>;
  if (p.B == 0 || p.T == 0 || p.N == 0) return {};
  if (!p.plain()) return forward_with<Config, Element, false>(p, stream);
  if constexpr (kHeadDim == 128) {
    using Fewer = ForwardConfig128Rows;
    if (fewer_rows_fit(p, Config::kTile.rows(), Fewer::kTile.rows()))
      return forward_with<Fewer, Element, true>(p, stream);
  }
  return forward_with<Config, Element, true>(p, stream);
}

}  // namespace jax_flash2::cuda::sm90
