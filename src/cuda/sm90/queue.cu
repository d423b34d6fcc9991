#include "cuda/sm90/queue.h"

#include "cuda/launch_kernel.cuh"
#include "cuda/ptx/grid.cuh"

namespace jax_flash2::cuda::sm90 {
namespace {

__global__ void clear_kernel(uint32_t* queue) {
  ptx::let_kernel_behind_begin();
  ptx::wait_for_kernels_before();
  *queue = 0;
}

}  // namespace

Status clear_queue(uint32_t* queue, cudaStream_t stream) {
  return launch_kernel({.early = true}, clear_kernel, 1, 1, 0, stream, queue);
}

}  // namespace jax_flash2::cuda::sm90
