// Panels in shared memory: where elements lie, how they come there, and their products in FMAs. Knows rows and columns, not
// who attends.
//
// The 16-byte chunks of a row lie permuted, chunk ^ row % 8, so that the 8 rows that lanes read at once are in different
// banks, as are the columns of a row, without padding.
#pragma once
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "core/mask.h"
#include "cuda/fma/config.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/shared.cuh"

namespace jax_flash2::cuda::fma {

// Which elements of a product this thread computes: rows ty + 8r, and columns so that the elements (r, c), (r, c + 1),
// (r + 1, c), (r + 1, c + 1) for even r and c are what one block of random words decides (core/dropout.h).
template <class Real>
struct Lane {
  int ty, tx;  // of 8 x 16; the 16 of a row are half a warp

  __device__ __forceinline__ Lane() {
    const int warp = threadIdx.x / 32, half = threadIdx.x % 32 / 16;
    ty = warp % 2 + half * 2 + warp / 2 * 4;  // halves two rows apart: their stores of floats meet in no bank
    tx = threadIdx.x % 16;
  }
  __device__ __forceinline__ int row(int r) const { return ty + 8 * r; }
  __device__ __forceinline__ int col(int c) const { return tx % 8 + tx / 8 * 16 + c % 2 * 8 + c / 2 * 32; }

  // Of element (r, c) in a panel.
  __device__ __forceinline__ int at(int r, int c) const {
    constexpr int kChunk = Panel<Real>::kChunk;
    return row(r) * Panel<Real>::kSide + (col(c) / kChunk ^ ty) * kChunk + tx % kChunk;
  }
};

// Neighbours, read or written at once: the first of them lies at a multiple of 16 bytes.
template <class Real>
struct Chunk {
  Real x[Panel<Real>::kChunk];
};
__device__ __forceinline__ Chunk<float> load_chunk(const float* at) {
  const float4 x = *reinterpret_cast<const float4*>(at);
  return {x.x, x.y, x.z, x.w};
}
__device__ __forceinline__ Chunk<double> load_chunk(const double* at) {
  const double2 x = *reinterpret_cast<const double2*>(at);
  return {x.x, x.y};
}
__device__ __forceinline__ void store_chunk(float* at, const Chunk<float>& c) {
  *reinterpret_cast<float4*>(at) = {c.x[0], c.x[1], c.x[2], c.x[3]};
}
__device__ __forceinline__ void store_chunk(double* at, const Chunk<double>& c) {
  *reinterpret_cast<double2*>(at) = {c.x[0], c.x[1]};
}

// sum + a b, by components.
template <class Real>
__device__ __forceinline__ Real add_dot(const Chunk<Real>& a, const Real (&b)[Panel<Real>::kChunk], Real sum) {
#pragma unroll
  for (int e = Panel<Real>::kChunk - 1; e >= 0; e--) sum = std::fma(a.x[e], b[e], sum);
  return sum;
}

// The largest, and the sum, of the values of a row's 16 lanes, in all of them.
template <class Real>
__device__ __forceinline__ Real row_max(Real x) {
#pragma unroll
  for (int d = 8; d > 0; d /= 2) x = fmax(x, __shfl_xor_sync(~0u, x, d));
  return x;
}
template <class Real>
__device__ __forceinline__ Real row_sum(Real x) {
#pragma unroll
  for (int d = 8; d > 0; d /= 2) x += __shfl_xor_sync(~0u, x, d);
  return x;
}

// A matrix in global memory: [rows][cols], whose rows are multiples of 16 bytes.
template <class Real>
struct Matrix {
  const Real* data_g;
  int64_t stride;
  int cols;
};

// Starts copying the panel whose first element is (row0, col0). Rows that are not `live` and columns past the matrix are not
// read; zeros stand for them.
template <class Real, class Live>
__device__ __forceinline__ void load_panel(Real* to_s, const Matrix<Real>& from, int row0, int col0, const Live& live) {
  constexpr int kChunk = Panel<Real>::kChunk, kSide = Panel<Real>::kSide;
  const int chunk = threadIdx.x % 16, row = threadIdx.x / 16, col = col0 + chunk * kChunk;
  const uint32_t to = ptx::shared_address(to_s + row * kSide + (chunk ^ row) * kChunk);
  const Real* from_g = from.data_g + (row0 + row) * from.stride + col;
#pragma unroll
  for (int k = 0; k < kSide / 8; k++) {
    const bool there = col < from.cols && live.has(row0 + row + 8 * k);
    ptx::cp_async_16(to + k * 8 * kSide * int{sizeof(Real)}, from_g + k * 8 * from.stride, there ? 16 : 0);
  }
}

// to += a b^T over the first `depth` columns of both, rounded up to four chunks: behind a matrix are zeros.
template <class Real>
__device__ __forceinline__ void multiply_abt(Elements<Real>& to, const Real* a_s, const Real* b_s, int depth,
                                             const Lane<Real>& lane) {
  constexpr int kChunk = Panel<Real>::kChunk, kSide = Panel<Real>::kSide;
  constexpr int kRows = Panel<Real>::kRows, kCols = Panel<Real>::kCols;
  const Real *const a = a_s + lane.row(0) * kSide, *const b = b_s + lane.col(0) * kSide;
#pragma unroll 1
  for (int d4 = 0; d4 < depth; d4 += 4 * kChunk) {
#pragma unroll
    for (int d = d4; d < d4 + 4 * kChunk; d += kChunk) {
      Chunk<Real> y[kCols];
#pragma unroll
      for (int c = 0; c < kCols; c++) {
        y[c] = load_chunk(b + (c % 2 * 8 + c / 2 * 32) * kSide + (d ^ lane.tx % 8 * kChunk));
      }
#pragma unroll
      for (int r = 0; r < kRows; r++) {
        const Chunk<Real> x = load_chunk(a + r * 8 * kSide + (d ^ lane.ty * kChunk));
#pragma unroll
        for (int c = 0; c < kCols; c++) {
#pragma unroll
          for (int e = 0; e < kChunk; e++) to[r][c] = std::fma(x.x[e], y[c].x[e], to[r][c]);
        }
      }
    }
  }
}

// to += a b. The thread's columns are here those of chunk tx.
template <class Real>
__device__ __forceinline__ void multiply_ab(Elements<Real>& to, const Real* a_s, const Real* b_s,
                                            const Lane<Real>& lane) {
  constexpr int kChunk = Panel<Real>::kChunk, kSide = Panel<Real>::kSide;
  const Real* const a = a_s + lane.row(0) * kSide;
#pragma unroll 2
  for (int k = 0; k < kSide; k += kChunk) {
    Chunk<Real> y[kChunk];
#pragma unroll
    for (int x = 0; x < kChunk; x++) y[x] = load_chunk(b_s + (k + x) * kSide + (lane.tx ^ (k + x) % 8) * kChunk);
#pragma unroll
    for (int r = 0; r < Panel<Real>::kRows; r++) {
      const Chunk<Real> x = load_chunk(a + r * 8 * kSide + (k ^ lane.ty * kChunk));
#pragma unroll
      for (int e = 0; e < kChunk; e++) {
#pragma unroll
        for (int c = 0; c < Panel<Real>::kCols; c++) to[r][c] = std::fma(x.x[e], y[e].x[c], to[r][c]);
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
