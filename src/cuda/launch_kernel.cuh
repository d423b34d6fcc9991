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

// How a kernel is launched.
struct Manner {
  // Not when the kernel before it on its stream has ended, but as soon as that one, where it is one of these, leaves room, so
  // that blocks come up while its last ones end. The kernel calls ptx::wait_for_kernels_before() ahead of all that touches
  // memory: others further back may still be running too. Not for code that cannot, see can_wait.
  bool early = false;
  bool together = false;  // all blocks at once, for they wait for each other
};

// Whether the current device runs a kernel's code for compute capability 9.0 or newer; to be asked of what is compiled for
// older ones too.
template <class... Parameters>
bool can_wait(void (*kernel)(Parameters...)) {
  cudaFuncAttributes code{};
  return cudaFuncGetAttributes(&code, kernel) == cudaSuccess && code.ptxVersion >= 90;
}

// Whether the driver keeps early kernels early in CUDA graphs.
inline bool driver_knows_early() {
  static const int version = [] {
    int driver = 0;
    return cudaDriverGetVersion(&driver) == cudaSuccess ? driver : 0;
  }();
  return version >= 12030;
}

// Enqueues a one-dimensional grid of blocks with `shared_bytes` of dynamic shared memory.
template <class... Parameters>
Status launch_kernel(Manner manner, void (*kernel)(Parameters...), int64_t blocks, dim3 threads, int shared_bytes,
                     cudaStream_t stream, const Parameters&... arguments) {
  if (blocks == 0) return {};
  if (blocks > INT32_MAX) return {"more blocks than a CUDA grid holds"};
  constexpr int kUnasked = 48 * 1024;  // what a kernel may have of shared memory without asking
  cudaError_t error = cudaSuccess;
  if (shared_bytes > kUnasked) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  }
  if (error == cudaSuccess) {
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = threads;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = attributes;
    if (manner.early && driver_knows_early()) {
      auto& attribute = attributes[config.numAttrs++];
      attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attribute.val.programmaticStreamSerializationAllowed = 1;
    }
    if (manner.together) {
      auto& attribute = attributes[config.numAttrs++];
      attribute.id = cudaLaunchAttributeCooperative, attribute.val.cooperative = 1;
    }
    error = cudaLaunchKernelEx(&config, kernel, arguments...);
  }
  return {error == cudaSuccess ? nullptr : cudaGetErrorString(error)};
}
template <class... Parameters>
Status launch_kernel(void (*kernel)(Parameters...), int64_t blocks, dim3 threads, int shared_bytes, cudaStream_t stream,
                     const Parameters&... arguments) {
  return launch_kernel(Manner{}, kernel, blocks, threads, shared_bytes, stream, arguments...);
}

}  // namespace jax_flash2::cuda
