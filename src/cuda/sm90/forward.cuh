// The forward pass on wgmma and TMA (compute capability 9.0): its kernel, whose blocks stay and take one tile of queries
// after the other, and the launch. One warpgroup plans and feeds (forward_planner.cuh, forward_producer.cuh), two to four
// compute (forward_consumer.cuh).
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "core/problem.h"
#include "cuda/launch_kernel.cuh"
#include "cuda/ptx/grid.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/sm90/forward_consumer.cuh"
#include "cuda/sm90/forward_plan.cuh"
#include "cuda/sm90/forward_planner.cuh"
#include "cuda/sm90/forward_producer.cuh"
#include "cuda/sm90/forward_work.cuh"
#include "cuda/sm90/queue.h"

namespace jax_flash2::cuda::sm90 {

template <class Config, class Element, Body kBody>
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
  ptx::let_kernel_behind_begin();
  ptx::wait_for_kernels_before();
  __syncthreads();  // barriers and marks are there

  const int warp = __shfl_sync(~0u, int(threadIdx.x / 32), 0);
  if (warp >= 4) {
    ptx::setmaxnreg_inc<kTile.consumer_registers()>();
    consume<Config, Element, kBody>(p, plan.pack_log2, shared, warp / 4 - 1);
    return;
  }
  ptx::setmaxnreg_dec<kTile.producer_registers()>();
  if (warp == 0 && ptx::elect_sync()) load_keys<Config, kBody>(plan, shared);
  if (warp == 1) plan_tiles<Config, kBody>(p, plan, shared);
  if (warp == 2 && ptx::elect_sync()) load_queries<Config>(plan, shared);
}

// Enqueues one body; the others need not exist.
template <class Config, class Element, Body kBody>
Status launch_forward(const Problem& p, const ForwardPlan& plan, cudaStream_t stream) {
  if (plan.queue) {
    if (const Status status = clear_queue(plan.queue, stream); !status.ok()) return status;
  }
  return launch_kernel({.early = true}, forward_kernel<Config, Element, kBody>, plan.schedule.workers,
                       Config::kTile.threads(), ForwardShared<Config>::kBytes, stream, p, plan);
}

template <class Config, class Element, Body kBody>
Status forward_with(const Problem& p, const Cut& cut, cudaStream_t stream) {
  ForwardPlan plan;
  if (const Status status = plan_forward<Config>(p, cut, &plan); !status.ok()) return status;
  return launch_forward<Config, Element, kBody>(p, plan, stream);
}

// The entry point that generated units instantiate: heads of up to kHeadDim columns, their values up to kValueDim.
template <class Element, int kHeadDim, int kValueDim = kHeadDim>
Status forward(const Problem& p, cudaStream_t stream) {
  using Config = ForwardConfig<kHeadDim, kValueDim>;
  using Fewer = FewerRowsConfig<kHeadDim, kValueDim>;
  if (p.B == 0 || p.T == 0 || p.N == 0) return {};
  Cut cut;
  if (p.body() == Body::kGeneral) {
    using Roomy = RoomyConfig<kHeadDim, kValueDim>;
    if (const Status status = cut_into_tiles<Roomy>(p, &cut); !status.ok()) return status;
    return forward_with<Roomy, Element, Body::kGeneral>(p, cut, stream);
  }
  if (const Status status = cut_into_tiles<Config>(p, &cut); !status.ok()) return status;
  if (p.body() == Body::kRemoving) return forward_with<Config, Element, Body::kRemoving>(p, cut, stream);
  if (p.body() == Body::kSpans) return forward_with<Config, Element, Body::kSpans>(p, cut, stream);
  if constexpr (Fewer::kTile.rows() < Config::kTile.rows()) {
    Cut fewer;
    if (const Status status = cut_into_tiles<Fewer>(p, &fewer); !status.ok()) return status;
    if (fewer.time < cut.time) return forward_with<Fewer, Element, Body::kPlain>(p, fewer, stream);
  }
  return forward_with<Config, Element, Body::kPlain>(p, cut, stream);
}

}  // namespace jax_flash2::cuda::sm90
