// The backward pass on wgmma and TMA (compute capability 9.0), FlashAttention-3's way: a block owns a tile of keys of
// one head and walks the query tiles that its mask leaves. Of its warps four feed (sm90/backward_feed.cuh), and two
// warpgroups compute (sm90/backward_narrow.cuh, backward_wide.cuh). Asks Mask, Score, Keep and DScore, and never knows
// which feature it serves.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "core/problem.h"
#include "cuda/convert.cuh"
#include "cuda/delta.cuh"
#include "cuda/launch_kernel.cuh"
#include "cuda/sm90/backward_feed.cuh"
#include "cuda/sm90/backward_narrow.cuh"
#include "cuda/sm90/backward_plan.cuh"
#include "cuda/sm90/backward_wide.cuh"
#include "cuda/sm90/convert_queries.cuh"

namespace jax_flash2::cuda::sm90 {

template <class Config, class Element, bool kPlain>
__global__ void __launch_bounds__(Config::kTile.threads(), 1)
    backward_kernel(const __grid_constant__ Problem p, const __grid_constant__ BackwardTensors tensors,
                    const __grid_constant__ BackwardSchedule schedule) {
  constexpr BackwardTile kTile = Config::kTile;
  using Shared = BackwardShared<Config>;
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  const uint32_t shared = ptx::shared_address(shared_memory);
  if (threadIdx.x == 0) {
    constexpr int kWarps = kTile.kConsumers * 4;
    Ring<1>{shared + Shared::kKRing}.init(kTile.wide ? kTile.kConsumers : kWarps);
    Ring<Shared::kDoutBuffers>{shared + Shared::kDoutRing}.init(kWarps);
    for (int s = 0; s < Shared::kStages; s++) {  // Q and the statistics come by two ways
      ptx::mbarrier_init(shared + Shared::kQRing + s * 16, 2);
      ptx::mbarrier_init(shared + Shared::kQRing + s * 16 + 8, kWarps);
    }
    for (int g = 0; g < kTile.kConsumers; g++) {
      ptx::mbarrier_init(shared + Shared::kDqRing + g * Ring<1>::kBytes, 4);
      ptx::mbarrier_init(shared + Shared::kDqRing + g * Ring<1>::kBytes + 8, 1);
    }
    ptx::fence_mbarrier_init();
    if (schedule.ordered) {
      int* const tickets = p.order.at<int>(p.batch(0)) + (p.T + 31) / 32;
      ptx::st_shared_b32(shared + Shared::kTicket, atomicAdd(tickets, 1));
    }
  }
  __syncthreads();  // barriers are there, and the ticket
  const uint32_t block = schedule.ordered ? ptx::ld_shared_b32(shared + Shared::kTicket) : blockIdx.x;

  const int warp = __shfl_sync(~0u, int(threadIdx.x / 32), 0);
  if (warp < 4) {
    ptx::setmaxnreg_dec<kTile.producer_registers()>();
    if (warp == 0) {
      if (ptx::elect_sync()) feed_tiles<Config>(p, tensors, schedule, block, shared);
    } else if (warp == 1) {
      feed_statistics<Config>(p, schedule, block, shared);
    } else {
      if (ptx::elect_sync()) drain_queries<Config>(p, schedule, block, shared, warp - 2);
    }
  } else {
    ptx::setmaxnreg_inc<kTile.consumer_registers()>();
    if constexpr (kTile.wide) {
      compute_wide<Config, Element, kPlain>(p, tensors, schedule, block, shared, warp / 4 - 1);
    } else {
      compute_narrow<Config, Element, kPlain>(p, tensors, schedule, block, shared, warp / 4 - 1);
    }
  }
}

// Enqueues one body; the other need not exist.
template <class Config, class Element, bool kPlain>
Status launch_backward(const Problem& p, const BackwardSchedule& schedule, cudaStream_t stream) {
  using Shared = BackwardShared<Config>;
  using QTile = typename Shared::QTile;
  using KTile = typename Shared::KTile;
  BackwardTensors tensors;
  const TensorMapEncoder encoder = find_tensor_map_encoder();
  const bool queries = p.T > 0;  // without queries Q and dO have no memory to point at, and nobody looks
  const TensorMapShape q_shape{queries ? p.T : p.S, queries ? p.N : p.K, p.D, QTile::kPanelCols, QTile::kRows};
  const TensorMapShape kv_shape{p.S, p.K, p.D, KTile::kPanelCols, KTile::kRows};
  const TensorMapShape out_shape{p.S, p.K, p.D, KTile::kPanelCols, 64};
  for (const Status status : {encode_tensor_map(encoder, p, queries ? p.q : p.k, q_shape, &tensors.q),
                              encode_tensor_map(encoder, p, queries ? p.dout : p.k, q_shape, &tensors.dout),
                              encode_tensor_map(encoder, p, p.k, kv_shape, &tensors.k),
                              encode_tensor_map(encoder, p, p.v, kv_shape, &tensors.v),
                              encode_tensor_map(encoder, p, p.dk, out_shape, &tensors.dk),
                              encode_tensor_map(encoder, p, p.dv, out_shape, &tensors.dv)}) {
    if (!status.ok()) return status;
  }
  return launch_kernel(backward_kernel<Config, Element, kPlain>, schedule.blocks(), Config::kTile.threads(),
                       Shared::kBytes, stream, p, tensors, schedule);
}

template <class Config, class Element>
Status backward_with(const Problem& p, cudaStream_t stream) {
  if (p.spec.deterministic && !p.order.present()) return {"a deterministic backward needs its order workspace"};
  BackwardSchedule schedule{};
  schedule.parts = 1;
  if (p.S > 0) {
    if (const Status s = backward_schedule<Config>(p, &schedule); !s.ok()) return s;
  }
  const bool split = schedule.parts > 1;
  if (p.T > 0) {
    if (const Status s = delta<Element>(p, split, stream); !s.ok()) return s;
  }
  if (p.S > 0) {
    const Status s = p.plain() ? launch_backward<Config, Element, true>(p, schedule, stream)
                               : launch_backward<Config, Element, false>(p, schedule, stream);
    if (!s.ok()) return s;
  }
  if (split) {
    if (const Status s = convert<Element, Gradient::kKey>(p, stream); !s.ok()) return s;
    if (const Status s = convert<Element, Gradient::kValue>(p, stream); !s.ok()) return s;
  }
  return p.T > 0 ? convert_queries<Element>(p, stream) : Status{};
}

// The entry point that generated units instantiate: heads of up to kHeadDim columns.
template <class Element, int kHeadDim>
Status backward(const Problem& p, cudaStream_t stream) {
  if (p.B == 0 || p.N == 0) return {};
  return backward_with<BackwardConfig<kHeadDim>, Element>(p, stream);
}

}  // namespace jax_flash2::cuda::sm90
