// Which compiled instance serves a call on a device.
#pragma once
#include <span>

#include "cuda/launch.h"

namespace jax_flash2::cuda {

struct Instance {
  const char* arch;
  const char* pass;
  const char* dtype;
  int head_dim, value_dim;  // serves heads of q and k up to the first, of v up to the second
  Status (*run)(const Problem&, cudaStream_t);
};

// Everything compiled in; of two that serve a call the faster one comes first.
std::span<const Instance> instances();

// The kernels made for 16-bit numbers on a device of this compute capability; null when it can run none. What they lack,
// those of sm80, which every device from 8.0 up runs, serve. So does every one run those of fma: float32 and float64.
const char* arch_for(int major, int minor);

}  // namespace jax_flash2::cuda
