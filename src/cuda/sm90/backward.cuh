// The backward pass on wgmma and TMA (compute capability 9.0), FlashAttention-3's way: a block owns a tile of keys of
// one head and walks the query tiles that its mask leaves. Of its warps four feed (sm90/backward_feed.cuh), and two
// warpgroups compute (sm90/backward_consumer.cuh). Asks Mask, Score and Operands, and never knows
// which feature it serves.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "core/problem.h"
#include "cuda/convert.cuh"
#include "cuda/delta.cuh"
#include "cuda/launch_kernel.cuh"
#include "cuda/score_gradients.cuh"
#include "cuda/sm90/backward_chores.cuh"
#include "cuda/sm90/backward_consumer.cuh"
#include "cuda/sm90/backward_feed.cuh"
#include "cuda/sm90/backward_narrow.cuh"
#include "cuda/sm90/backward_plan.cuh"
#include "cuda/sm90/backward_wide.cuh"
#include "cuda/sm90/convert_queries.cuh"

namespace jax_flash2::cuda::sm90 {

template <class Config, class Element, Body kBody>
__global__ void __launch_bounds__(Config::kTile.threads(), 1)
    backward_kernel(const __grid_constant__ Problem p, const __grid_constant__ BackwardTensors tensors,
                    const __grid_constant__ BackwardSchedule schedule) {
  constexpr BackwardTile kTile = Config::kTile;
  constexpr bool kSpans = kBody != Body::kPlain;
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
    Ring<1>{shared + Shared::kChoreRing}.init(1);
    Ring<Shared::kPlans>{shared + Shared::kPlanRing}.init(Plans<Config, kSpans>::readers(schedule.drains()));
    ptx::fence_mbarrier_init();
  }
  __syncthreads();  // barriers are there

  const int warp = __shfl_sync(~0u, int(threadIdx.x / 32), 0);
  if (warp < 4) {
    ptx::setmaxnreg_dec<kTile.producer_registers()>();
    if (warp == 0) {
      if (ptx::elect_sync()) feed_tiles<Config, kSpans>(p, tensors, schedule, shared);
    } else if (warp == 1) {
      feed_statistics<Config, kBody>(p, schedule, shared);
    } else if (warp == 2) {
      drain_queries<Config, kSpans>(p, schedule, shared, 0, schedule.chores ? 2 : 1);
    } else if (!schedule.chores) {
      drain_queries<Config, kSpans>(p, schedule, shared, 1, 2);
    } else if constexpr (Shared::kHasChores) {
      Chores<Config, Element, kSpans>(p, tensors, schedule, shared).run();
    }
  } else {
    ptx::setmaxnreg_inc<kTile.consumer_registers()>();
    using Kind = std::conditional_t<kTile.wide, WideTile<Config, Element, kBody>, NarrowTile<Config, Element, kBody>>;
    Kind kind(p, tensors, schedule, shared, warp / 4 - 1);
    compute<Config, Element, kBody>(kind);
  }
}

// Enqueues one body; the others need not exist.
template <class Config, class Element, Body kBody>
Status launch_backward(const Problem& p, const BackwardSchedule& schedule, cudaStream_t stream) {
  using Shared = BackwardShared<Config>;
  BackwardTensors tensors;
  const TensorMapEncoder encoder = find_tensor_map_encoder();
  const bool queries = p.T > 0;  // without queries Q and dO have no memory to point at, and nobody looks
  const auto of_queries = [&](int cols, int panel) {
    return TensorMapShape{queries ? p.T : p.S, queries ? p.N : p.K, cols, panel, Config::kTile.queries};
  };
  const auto of_keys = [&](int cols, int panel, int rows) { return TensorMapShape{p.S, p.K, cols, panel, rows}; };
  constexpr int kKeys = Config::kTile.keys(), kKeyPanel = Shared::kKeyPanel, kValuePanel = Shared::kValuePanel;
  for (const Status status :
       {encode_tensor_map(encoder, p, queries ? p.q : p.k, of_queries(p.D, kKeyPanel), &tensors.q),
        encode_tensor_map(encoder, p, queries ? p.dout : p.v, of_queries(p.Dv, kValuePanel), &tensors.dout),
        encode_tensor_map(encoder, p, queries ? p.out : p.v, of_queries(p.Dv, kValuePanel), &tensors.out),
        encode_tensor_map(encoder, p, p.k, of_keys(p.D, kKeyPanel, kKeys), &tensors.k),
        encode_tensor_map(encoder, p, p.v, of_keys(p.Dv, kValuePanel, kKeys), &tensors.v),
        encode_tensor_map(encoder, p, p.dk, of_keys(p.D, kKeyPanel, 64), &tensors.dk),
        encode_tensor_map(encoder, p, p.dv, of_keys(p.Dv, kValuePanel, 64), &tensors.dv)}) {
    if (!status.ok()) return status;
  }
  return launch_kernel({.together = schedule.waits()}, backward_kernel<Config, Element, kBody>, schedule.blocks(),
                       Config::kTile.threads(), Shared::kBytes, stream, p, tensors, schedule);
}

template <class Config, class Element, Body kBody>
Status backward_with(const Problem& p, cudaStream_t stream) {
  if (p.spec.deterministic && !p.order.present()) return {"a deterministic backward needs its order workspace"};
  BackwardSchedule schedule{};
  schedule.parts = 1;
  if (p.S > 0) {
    if (const Status s = backward_schedule<Config>(p, &schedule); !s.ok()) return s;
  }
  const bool split = schedule.parts > 1;
  if (const Status s = clear_score_gradients(p, stream); !s.ok()) return s;
  if (schedule.chores) {
    if (cudaMemsetAsync(p.order.data, 0, p.counters() * sizeof(int), stream) != cudaSuccess) {
      return {"clearing the counters of the backward failed"};
    }
  } else if (p.T > 0) {
    if (const Status s = delta<Element>(p, split, stream); !s.ok()) return s;
  }
  if (p.S > 0) {
    if (const Status s = launch_backward<Config, Element, kBody>(p, schedule, stream); !s.ok()) return s;
  }
  if (split) {
    if (const Status s = convert<Element, Gradient::kKey>(p, stream); !s.ok()) return s;
    if (const Status s = convert<Element, Gradient::kValue>(p, stream); !s.ok()) return s;
  }
  if (schedule.chores) return scale_gradient<Element, tile::RowBlocks>(p, stream);
  return p.T > 0 ? convert_queries<Element>(p, stream) : Status{};
}

// The entry point that generated units instantiate: heads of up to kHeadDim columns of Q and K, kValueDim of V.
template <class Element, int kHeadDim, int kValueDim = kHeadDim>
Status backward(const Problem& p, cudaStream_t stream) {
  if (p.B == 0 || p.N == 0) return {};
  using Config = BackwardConfig<kHeadDim, kValueDim>;
  switch (p.body()) {
    case Body::kPlain: return backward_with<Config, Element, Body::kPlain>(p, stream);
    case Body::kSpans: return backward_with<Config, Element, Body::kSpans>(p, stream);
    case Body::kRemoving: return backward_with<Config, Element, Body::kRemoving>(p, stream);
    default: return backward_with<RoomyBackwardConfig<kHeadDim, kValueDim>, Element, Body::kGeneral>(p, stream);
  }
}

}  // namespace jax_flash2::cuda::sm90
