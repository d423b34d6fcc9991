// Which compiled instance serves a call on a device.
#pragma once
#include <span>

#include "cuda/launch.h"

namespace jax_flash2::cuda {

struct Instance {
  const char* arch;
  const char* pass;
  const char* dtype;
  int head_dim;  // serves every head dim up to it
  Status (*run)(const Problem&, cudaStream_t);
};

// Everything compiled in, head dims ascending.
std::span<const Instance> instances();

// The kernels that a device of this compute capability runs; null when it can run none.
const char* arch_for(int major, int minor);

}  // namespace jax_flash2::cuda
