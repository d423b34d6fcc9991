// A tile of 16-bit elements in shared memory: where each of its 16-byte chunks lies. Knows no thread and no
// instruction.
//
// The columns are cut into panels of 64 (32 where 64 does not divide them); a panel is kRows rows of 128 (64) bytes,
// whose chunks are XORed with the row, so that eight rows of one chunk column, which is what ldmatrix reads and what
// fragments write, lie in different banks. It is the pattern of TMA's 128B (64B) swizzle. Tiles start at a multiple of
// kAlignment.
#pragma once
#include <cstdint>

namespace jax_flash2::cuda::tile {

template <int kRows_, int kCols_, int kPanelCols_ = kCols_ % 64 == 0 ? 64 : 32>
struct SharedTile {
  static constexpr int kRows = kRows_, kCols = kCols_;
  static constexpr int kAlignment = 1024;
  static constexpr int kPanelCols = kPanelCols_;
  static constexpr int kPanels = kCols / kPanelCols;
  static constexpr int kRowBytes = kPanelCols * 2;
  static constexpr int kPanelChunks = kRowBytes / 16;
  static constexpr int kPanelBytes = kRows * kRowBytes;
  static constexpr int kBytes = kPanels * kPanelBytes;
  static_assert(kCols % 32 == 0 && kBytes % kAlignment == 0);

  // Byte offset of chunk `chunk` (8 columns) of row `row`.
  static __host__ __device__ constexpr uint32_t offset(int row, int chunk) {
    const int phase = kRowBytes == 128 ? row & 7 : (row >> 1) & 3;
    return chunk / kPanelChunks * kPanelBytes + row * kRowBytes + ((chunk % kPanelChunks ^ phase) << 4);
  }

  // The offset of (row + 16 dr, chunk + 2 dc) from the offset `o` of (row, chunk), for row < 16 and chunk < 2: one XOR
  // of a lane's own offset with a constant, and a constant that folds into the instruction.
  static __host__ __device__ constexpr uint32_t advance(uint32_t o, int dr, int dc) {
    constexpr int kPanelBlocks = kPanelCols / 16;
    return (o ^ (dc % kPanelBlocks * 32)) + dc / kPanelBlocks * kPanelBytes + dr * 16 * kRowBytes;
  }
};

}  // namespace jax_flash2::cuda::tile
