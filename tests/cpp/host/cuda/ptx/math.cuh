// In place of src/cuda/ptx/math.cuh for a test on the host.
#pragma once
#include <cmath>

namespace jax_flash2::cuda::ptx {

inline float ex2(float x) { return std::exp2(x) < 0x1p-126f ? 0.0f : std::exp2(x); }
inline float lg2(float x) { return std::log2(x); }
inline float rcp(float x) { return 1 / x; }

}  // namespace jax_flash2::cuda::ptx
