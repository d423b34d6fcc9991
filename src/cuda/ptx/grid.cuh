// What a kernel says to its neighbours on a stream, where Manner of cuda/launch_kernel.cuh lets them overlap. Nothing
// below compute capability 9.0.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-griddepcontrol
#pragma once

namespace jax_flash2::cuda::ptx {

// Until the kernels before have ended, and what they have written is there.
__device__ __forceinline__ void wait_for_kernels_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The kernel behind may begin once all blocks have called this, or ended.
__device__ __forceinline__ void let_kernel_behind_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace jax_flash2::cuda::ptx
