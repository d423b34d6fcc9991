// The counter that blocks of the forward draw their tiles from.
#pragma once
#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/problem.h"

namespace jax_flash2::cuda::sm90 {

// By a kernel: unlike a memset, one can be followed early.
Status clear_queue(uint32_t* queue, cudaStream_t stream);

}  // namespace jax_flash2::cuda::sm90
