// Shared memory by 32-bit address. Every function is `asm volatile`, so these keep their order among themselves and
// with
// __syncthreads(); shared tiles are touched through them alone, never through C++ pointers.
#pragma once
#include <cstdint>

namespace jax_flash2::cuda::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Four 8 x 8 matrices of 16-bit elements. Lanes 8i .. 8i + 7 give the row addresses (16 bytes each) of matrix i; lane l
// receives in r[i] elements (row l / 4, columns 2 (l % 4) + {0, 1}) of matrix i.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-instructions-ldmatrix
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

// The same of the transposed matrices: lane l receives elements (rows 2 (l % 4) + {0, 1}, column l / 4).
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

__device__ __forceinline__ void st_shared_b32(uint32_t address, uint32_t x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(x));
}

__device__ __forceinline__ void st_shared_b64(uint32_t address, uint64_t x) {
  asm volatile("st.shared.b64 [%0], %1;" ::"r"(address), "l"(x));
}

__device__ __forceinline__ void st_shared_f32(uint32_t address, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x));
}

__device__ __forceinline__ void st_shared_v4(uint32_t address, uint4 x) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w));
}

__device__ __forceinline__ void st_shared_v4_f32(uint32_t address, const float (&x)[4]) {
  asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(address), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]));
}

// *address |= x, without an answer.
__device__ __forceinline__ void red_shared_or_b32(uint32_t address, uint32_t x) {
  asm volatile("red.shared.or.b32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

__device__ __forceinline__ uint32_t ld_shared_b32(uint32_t address) {
  uint32_t x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(address));
  return x;
}

__device__ __forceinline__ uint64_t ld_shared_b64(uint32_t address) {
  uint64_t x;
  asm volatile("ld.shared.b64 %0, [%1];" : "=l"(x) : "r"(address));
  return x;
}

__device__ __forceinline__ float2 ld_shared_v2_f32(uint32_t address) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address));
  return x;
}

__device__ __forceinline__ float4 ld_shared_v4_f32(uint32_t address) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(address));
  return x;
}

__device__ __forceinline__ uint4 ld_shared_v4(uint32_t address) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(address));
  return x;
}

}  // namespace jax_flash2::cuda::ptx
