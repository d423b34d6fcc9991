// Buffers in shared memory that one producer fills and several consumers empty, in turn. Knows no contents.
#pragma once
#include <cstdint>

#include "cuda/ptx/mbarrier.cuh"

namespace jax_flash2::cuda::sm90 {

// kStages buffers, each with a barrier "full" and one "empty", 16 bytes apart from `barriers` on.
template <int kStages>
struct Ring {
  static constexpr int kBytes = kStages * 16;

  uint32_t barriers;
  int stage = 0;
  uint32_t parity = 0;  // of the buffer's use: changes each time round

  __device__ __forceinline__ void init(int arrivals_of_consumers) const {
    for (int s = 0; s < kStages; s++) {
      ptx::mbarrier_init(barriers + s * 16, 1);
      ptx::mbarrier_init(barriers + s * 16 + 8, arrivals_of_consumers);
    }
  }
  __device__ __forceinline__ void next() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
  __device__ __forceinline__ uint32_t full() const { return barriers + stage * 16; }
  __device__ __forceinline__ void wait_full() const { ptx::mbarrier_wait_parity(full(), parity); }
  __device__ __forceinline__ void wait_empty() const { ptx::mbarrier_wait_parity(full() + 8, parity ^ 1); }
  __device__ __forceinline__ void release() const { ptx::mbarrier_arrive(full() + 8); }
};

}  // namespace jax_flash2::cuda::sm90
