// The dtypes of instances.cmake as C++ types.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace jax_flash2::cuda {

using bf16 = __nv_bfloat16;
using f16 = __half;
using f32 = float;
using f64 = double;

}  // namespace jax_flash2::cuda
