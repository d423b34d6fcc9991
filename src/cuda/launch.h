// What the rest of the package knows of the CUDA kernels: two passes over a Problem, enqueued on a stream of the current
// device. They allocate nothing and never wait, so a CUDA graph can capture them.
#pragma once
#include <cuda_runtime_api.h>

#include "core/problem.h"

namespace jax_flash2::cuda {

// Writes out and lse.
Status forward(const Problem& p, cudaStream_t stream);

// Writes dq, dk, dv and the gradient slots that are present; scribbles over the workspaces.
Status backward(const Problem& p, cudaStream_t stream);

}  // namespace jax_flash2::cuda
