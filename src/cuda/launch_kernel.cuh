// Host side of a kernel launch: asks the current device, enqueues, answers a Status. Knows no kernel.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "core/problem.h"

namespace jax_flash2::cuda {

// An attribute of the current device; 0 when it cannot be read.
inline int device_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  return cudaDeviceGetAttribute(&value, attribute, device) == cudaSuccess ? value : 0;
}

// Enqueues a one-dimensional grid of blocks with `shared_bytes` of dynamic shared memory.
template <class... Parameters>
Status launch_kernel(void (*kernel)(Parameters...), int64_t blocks, dim3 threads, int shared_bytes, cudaStream_t stream,
                     const Parameters&... arguments) {
  if (blocks == 0) return {};
  if (blocks > INT32_MAX) return {"more blocks than a CUDA grid holds"};
  constexpr int kUnasked = 48 * 1024;  // what a kernel may have of shared memory without asking
  cudaError_t error = cudaSuccess;
  if (shared_bytes > kUnasked) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  }
  if (error == cudaSuccess) {
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = threads;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    error = cudaLaunchKernelEx(&config, kernel, arguments...);
  }
  return {error == cudaSuccess ? nullptr : cudaGetErrorString(error)};
}

}  // namespace jax_flash2::cuda
