// A shared tile as an operand of wgmma: the descriptor of each of its steps of 16 along k. Knows no thread.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-shared-memory-layout
//
// The low word holds the start address and the leading offset, the high word the stride and the swizzle; addresses and
// offsets count 16 bytes. The swizzle is a function of the address, so a start inside a row stays valid.
//   along k    rows are m or n. stride: from one group of 8 rows to the next; no leading offset: one step lies in a row
//   along m, n rows are k.      stride: from one group of 8 rows to the next; leading: from one panel to the next
#pragma once
#include <cstdint>

#include "cuda/ptx/wgmma.cuh"
#include "cuda/tile/shared_tile.cuh"

namespace jax_flash2::cuda::tile {

template <class Tile, ptx::Major kMajor>
struct Operand {
  static constexpr uint32_t kSwizzle = Tile::kRowBytes == 128 ? 1 : 2;
  static constexpr uint32_t kLeading = kMajor == ptx::Major::kMN ? Tile::kPanelBytes >> 4 : 1;
  static constexpr uint32_t kHigh = kSwizzle << 30 | 8 * Tile::kRowBytes >> 4;
  static_assert(kLeading < 1 << 14);

  uint32_t low;

  // `row`: of the tile, a multiple of 8; along k only.
  __device__ __forceinline__ explicit Operand(uint32_t tile, int row = 0)
      : low(kLeading << 16 | (tile + row * Tile::kRowBytes) >> 4) {}

  // Step `k16` of the same operand in a tile that lies `bytes` further on.
  __device__ __forceinline__ uint64_t step(int k16, uint32_t bytes = 0) const {
    constexpr int kPanelSteps = Tile::kPanelCols / 16;
    const int offset = kMajor == ptx::Major::kK ? k16 / kPanelSteps * Tile::kPanelBytes + k16 % kPanelSteps * 32
                                                : k16 * 16 * Tile::kRowBytes;
    return uint64_t(kHigh) << 32 | (low + ((offset + bytes) >> 4));
  }
};

}  // namespace jax_flash2::cuda::tile
