// Panels of 64 x 64 floats in shared memory: where elements lie, how they come there, and their products in float32 FMAs.
// Knows rows and columns, not who attends.
//
// The 16-byte chunks of a row lie permuted, chunk ^ row % 8, so that the 8 rows that lanes read at once are in different
// banks, as are the columns of a row, without padding.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "core/mask.h"
#include "cuda/fma/config.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/shared.cuh"

namespace jax_flash2::cuda::fma {

// Which elements of a product this thread computes: rows ty + 8r, and columns so that the elements (r, c), (r, c + 1),
// (r + 1, c), (r + 1, c + 1) for even r and c are what one block of random words decides (core/dropout.h).
struct Lane {
  int ty, tx;  // of 8 x 16; the 16 of a row are half a warp

  __device__ __forceinline__ Lane() {
    const int warp = threadIdx.x / 32, half = threadIdx.x % 32 / 16;
    ty = warp % 2 + half * 2 + warp / 2 * 4;  // halves two rows apart: their stores meet in no bank
    tx = threadIdx.x % 16;
  }
  __device__ __forceinline__ int row(int r) const { return ty + 8 * r; }
  __device__ __forceinline__ int col(int c) const { return tx % 8 + tx / 8 * 16 + c % 2 * 8 + c / 2 * 32; }

  // Of element (r, c) in a panel.
  __device__ __forceinline__ int at(int r, int c) const { return row(r) * kSide + ((col(c) / 4 ^ ty) * 4) + tx % 4; }
};

__device__ __forceinline__ float4 load4(const float* at) { return *reinterpret_cast<const float4*>(at); }

// The largest, and the sum, of the values of a row's 16 lanes, in all of them.
__device__ __forceinline__ float row_max(float x) {
#pragma unroll
  for (int d = 8; d > 0; d /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, d));
  return x;
}
__device__ __forceinline__ float row_sum(float x) {
#pragma unroll
  for (int d = 8; d > 0; d /= 2) x += __shfl_xor_sync(~0u, x, d);
  return x;
}

// A matrix in global memory: [rows][cols], cols a multiple of 4.
struct Matrix {
  const float* data_g;
  int64_t stride;
  int cols;
};

// Starts copying the panel of rows [row0, row0 + 64) and columns [col0, col0 + 64). Rows that are not `live` and columns
// past the matrix are not read; zeros stand for them.
template <class Live>
__device__ __forceinline__ void load_panel(float* to_s, const Matrix& from, int row0, int col0, const Live& live) {
  const int chunk = threadIdx.x % 16, row = threadIdx.x / 16, col = col0 + chunk * 4;
  const uint32_t to = ptx::shared_address(to_s + row * kSide + (chunk ^ row) * 4);
  const float* from_g = from.data_g + (row0 + row) * from.stride + col;
#pragma unroll
  for (int k = 0; k < 8; k++) {
    const bool there = col < from.cols && live.has(row0 + row + 8 * k);
    ptx::cp_async_16(to + k * 8 * kSide * 4, from_g + k * 8 * from.stride, there ? 16 : 0);
  }
}

// to += a b^T over the first `depth` columns of both, rounded up to 16: behind a matrix are zeros.
__device__ __forceinline__ void multiply_abt(float (&to)[kRows][kCols], const float* a_s, const float* b_s, int depth,
                                             const Lane& lane) {
  const float *const a = a_s + lane.row(0) * kSide, *const b = b_s + lane.col(0) * kSide;
#pragma unroll 1
  for (int d16 = 0; d16 < depth; d16 += 16) {
#pragma unroll
    for (int d = d16; d < d16 + 16; d += 4) {
      float4 y[kCols];
#pragma unroll
      for (int c = 0; c < kCols; c++) y[c] = load4(b + (c % 2 * 8 + c / 2 * 32) * kSide + (d ^ lane.tx % 8 * 4));
#pragma unroll
      for (int r = 0; r < kRows; r++) {
        const float4 x = load4(a + r * 8 * kSide + (d ^ lane.ty * 4));
#pragma unroll
        for (int c = 0; c < kCols; c++) {
          to[r][c] = fmaf(x.x, y[c].x, to[r][c]);
          to[r][c] = fmaf(x.y, y[c].y, to[r][c]);
          to[r][c] = fmaf(x.z, y[c].z, to[r][c]);
          to[r][c] = fmaf(x.w, y[c].w, to[r][c]);
        }
      }
    }
  }
}

// to += a b. The thread's columns are here 4 tx and the next three.
__device__ __forceinline__ void multiply_ab(float (&to)[kRows][kCols], const float* a_s, const float* b_s,
                                            const Lane& lane) {
  const float* const a = a_s + lane.row(0) * kSide;
#pragma unroll 2
  for (int k = 0; k < kSide; k += 4) {
    float4 y[4];
#pragma unroll
    for (int x = 0; x < 4; x++) y[x] = load4(b_s + (k + x) * kSide + (lane.tx ^ (k + x) % 8) * 4);
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      const float4 x = load4(a + r * 8 * kSide + (k ^ lane.ty * 4));
      const float x_k[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int e = 0; e < 4; e++) {
        to[r][0] = fmaf(x_k[e], y[e].x, to[r][0]);
        to[r][1] = fmaf(x_k[e], y[e].y, to[r][1]);
        to[r][2] = fmaf(x_k[e], y[e].z, to[r][2]);
        to[r][3] = fmaf(x_k[e], y[e].w, to[r][3]);
      }
    }
  }
}

// One step of a stream of panels through kSlots slots: `work(slot)` on what was loaded last, and `load(slot)` for the next.
template <int kSlots, class Work, class Load>
__device__ __forceinline__ void step(int& slot, const Work& work, const Load& load) {
  ptx::cp_async_wait_group<0>();
  __syncthreads();  // what all threads loaded is there, and every warp has left the step before
  const int now = slot;
  slot ^= kSlots - 1;
  if (kSlots == 2) load(slot);
  work(now);
  if (kSlots == 1) {
    __syncthreads();  // every warp has left the slot
    load(slot);
  }
}

}  // namespace jax_flash2::cuda::fma
