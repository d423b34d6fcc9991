// Registers to shared memory in 8 x 8 blocks: what ldmatrix (ptx/shared.cuh) reads, written. sm_90.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-instructions-stmatrix
#pragma once
#include <cstdint>

namespace jax_flash2::cuda::ptx {

// Four 8 x 8 matrices of 16-bit elements. Lanes 8i .. 8i + 7 give the row addresses (16 bytes each) of matrix i; lane l
// holds in r<i> elements (row l / 4, columns 2 (l % 4) + {0, 1}) of matrix i.
__device__ __forceinline__ void stmatrix_x4(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(r0), "r"(r1),
               "r"(r2), "r"(r3)
               : "memory");
}

// The same of the transposed matrices: lane l holds elements (rows 2 (l % 4) + {0, 1}, column l / 4).
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2,
                                                  uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(r0), "r"(r1),
               "r"(r2), "r"(r3)
               : "memory");
}

}  // namespace jax_flash2::cuda::ptx
