// What both kinds of tile of the backward do to keys and queries that are dead, and how their loops keep within registers.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "core/problem.h"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/sm90/backward_plan.cuh"

namespace jax_flash2::cuda::sm90 {

// The same number, of which the compiler knows nothing.
__device__ __forceinline__ uint32_t forget(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

// 64 rows of a gradient of keys that no query sees, by a warpgroup.
template <class Element>
__device__ __forceinline__ void clear_rows(Element* to, int64_t stride, int row0, int rows, int cols) {
  const int chunks = cols / 8;
  for (int x = threadIdx.x % 128; x < 64 * chunks; x += 128) {
    const int row = row0 + x / chunks;
    if (row < rows) *reinterpret_cast<uint4*>(to + row * stride + x % chunks * 8) = uint4{};
  }
}

// Rows that nobody reads may hold NaN, and a zero times a NaN is no zero: they are cleared where they are summed over.
// Each warpgroup clears what it is about to read. row0: of the tile; rows: of the tensor, past which there are zeros
// already.
template <class Tile>
__device__ __forceinline__ void clear_dead_rows(uint32_t tile, int row0, int rows, Live live, int barrier) {
  if (live.spans) {
    bool dead = false;
    for (int row = row0 + threadIdx.x % 32; row < min_(row0 + Tile::kRows, rows); row += 32) dead |= !live.has(row);
    if (!__any_sync(~0u, dead)) return;
  } else if (row0 >= live.begin && min_(row0 + Tile::kRows, rows) <= live.end) {
    return;
  }
  constexpr int kChunks = Tile::kCols / 8;
  for (int x = threadIdx.x % 128; x < Tile::kRows * kChunks; x += 128) {
    if (!live.has(row0 + x / kChunks)) ptx::st_shared_v4(tile + Tile::offset(x / kChunks, x % kChunks), {});
  }
  ptx::fence_proxy_async();  // the tensor core is to see the zeros, and later copies are to come after them
  ptx::bar_sync(barrier, 128);
}

}  // namespace jax_flash2::cuda::sm90
