// Arithmetic that C++ has no exact name for: approximate functions, conversions in pairs, reductions in memory.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#floating-point-instructions
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace jax_flash2::cuda::ptx {

// 2^x within 2 ulp; results below 2^-126 become 0; ex2(-inf) = 0.
__device__ __forceinline__ float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// log2(x), absolute error 2^-22 near 1, else 1 ulp or so.
__device__ __forceinline__ float lg2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x within 1 ulp.
__device__ __forceinline__ float rcp(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two floats rounded to nearest even; `lo` in the lower half.
template <class Element>
__device__ __forceinline__ uint32_t cvt_x2(float lo, float hi) {
  uint32_t r;
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  } else {
    static_assert(std::is_same_v<Element, __half>);
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  }
  return r;
}

// *address += x, without an answer.
__device__ __forceinline__ void red_global_add_f32(float* address, float x) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(address), "f"(x) : "memory");
}

}  // namespace jax_flash2::cuda::ptx
