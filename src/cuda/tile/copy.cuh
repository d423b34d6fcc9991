// Tiles between global and shared memory, by all threads of a block together. Knows rows and columns, not who attends.
#pragma once
#include <cstdint>

#include "core/mask.h"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/tile/shared_tile.cuh"

namespace jax_flash2::cuda::tile {

// One thread's part in copies of tiles of one matrix [rows][cols] of 16-bit elements: a fixed chunk column of each
// panel and every kStep-th row, so that the swizzle is worked out once, and lanes of a row read 128 (64) contiguous
// bytes.
template <class Tile, int kThreads>
struct Copy {
  static constexpr int kStep = kThreads / Tile::kPanelChunks, kPasses = Tile::kRows / kStep;
  static_assert(kThreads % Tile::kPanelChunks == 0 && kStep % 8 == 0 && Tile::kRows % kStep == 0);

  int row;          // this thread's first row of a tile
  uint32_t offset;  // of its chunk of the first panel in a tile

  __device__ __forceinline__ Copy()
      : row(threadIdx.x / Tile::kPanelChunks), offset(Tile::offset(row, int(threadIdx.x) % Tile::kPanelChunks)) {}

  // Starts copying rows [row0, row0 + kRows) of `matrix`, whose rows of `cols` elements (a multiple of 8, at most the
  // tile's) lie `stride` apart. Rows outside `live` and columns past the matrix are not read; zeros stand for them.
  template <class Element>
  __device__ __forceinline__ void load(uint32_t tile, const Element* matrix, int64_t stride, int cols, int row0,
                                       Live live) const {
    const Element* from = matrix + (row0 + row) * stride + threadIdx.x % Tile::kPanelChunks * 8;
    const unsigned span = max_(live.end - live.begin, 0), first = row0 + row - live.begin;
#pragma unroll
    for (int pass = 0; pass < kPasses; pass++) {
      // Unsigned: false below the range too.
      const bool in = first + pass * kStep < span && (!live.spans || live.spans[row0 + row + pass * kStep].alive());
#pragma unroll
      for (int panel = 0; panel < Tile::kPanels; panel++) {
        ptx::cp_async_16(tile + offset + panel * Tile::kPanelBytes + pass * kStep * Tile::kRowBytes,
                         from + panel * Tile::kPanelCols, in && holds(panel, cols) ? 16 : 0);
      }
      from += kStep * stride;
    }
  }

  // Writes rows [row0, row0 + kRows) of `matrix` that lie below `rows`, and its own columns only, from a tile.
  template <class Element>
  __device__ __forceinline__ void store(Element* matrix, int64_t stride, int cols, int row0, int rows,
                                        uint32_t tile) const {
    Element* to = matrix + (row0 + row) * stride + threadIdx.x % Tile::kPanelChunks * 8;
#pragma unroll
    for (int pass = 0; pass < kPasses; pass++) {
      if (row0 + row + pass * kStep < rows) {
#pragma unroll
        for (int panel = 0; panel < Tile::kPanels; panel++) {
          if (holds(panel, cols))
            *reinterpret_cast<uint4*>(to + panel * Tile::kPanelCols) =
                ptx::ld_shared_v4(tile + offset + panel * Tile::kPanelBytes + pass * kStep * Tile::kRowBytes);
        }
      }
      to += kStep * stride;
    }
  }

 private:
  // Whether this thread's chunk of a panel lies inside the matrix.
  static __device__ __forceinline__ bool holds(int panel, int cols) {
    return panel * Tile::kPanelCols + int(threadIdx.x) % Tile::kPanelChunks * 8 < cols;
  }
};

}  // namespace jax_flash2::cuda::tile
