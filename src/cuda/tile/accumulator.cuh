// A float32 matrix in global memory that blocks add their fragments to: where each element lies, and the adding. Knows
// no softmax.
//
// One `red` instruction of a warp should touch whole 32-byte sectors, but a lane of a C fragment holds two columns of a
// row, and its quad eight. So the matrix is kept in blocks of 8 x 8 in the order in which fragments hold them: 32
// lanes' first elements, then their second ones. The last rows, if fewer than 8, are kept row by row.
#pragma once
#include <cstdint>

#include "core/spec.h"
#include "cuda/ptx/math.cuh"

namespace jax_flash2::cuda::tile {

struct Accumulator {
  int rows, cols;  // cols is a multiple of 8

  JAX_FLASH2_HD constexpr bool whole(int row) const { return (row | 7) < rows; }

  JAX_FLASH2_HD constexpr int64_t offset(int row, int col) const {
    const int64_t block_row = int64_t(row & ~7) * cols;
    return whole(row) ? block_row + (col & ~7) * 8 + (col & 1) * 32 + (row & 7) * 4 + (col >> 1 & 3)
                      : block_row + int64_t(row & 7) * cols + col;
  }
};

// Adds the C fragments of kRowBlocks x (2 kColBlocks) blocks of 16 x 8 to `to`. Row blocks lie one after another from
// `row0`, a multiple of 8; columns are those of blocks of 16 that stand kColStep blocks apart, the first being
// `col_block`. kWhole: all rows exist, and in whole blocks of 8.
template <bool kWhole, int kColStep, int kRowBlocks, int kCols8>
__device__ __forceinline__ void add_fragments(const float (&x)[kRowBlocks][kCols8][4], float* to, Accumulator shape,
                                              int row0, int col_block) {
  const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const auto whole = [&](int i) { return kWhole || shape.whole(row0 + i * 8); };
  float* at[2 * kRowBlocks];  // of this lane, at the first block of 8 columns
#pragma unroll
  for (int i = 0; i < 2 * kRowBlocks; i++) {
    float* const block_row = to + (row0 + i * 8) * int64_t(shape.cols);
    at[i] = block_row + (whole(i) ? col_block * 128 + lane : g * shape.cols + col_block * 16 + 2 * q);
  }
#pragma unroll
  for (int j = 0; j < kCols8; j++) {
    constexpr int kStep = kColStep * 16;
    const int offset = j / 2 * kStep + j % 2 * 8;
    if (col_block * 16 + offset < shape.cols) {
#pragma unroll
      for (int i = 0; i < 2 * kRowBlocks; i++) {
        const float* const pair = &x[i / 2][j][i % 2 * 2];
        if (kWhole || row0 + i * 8 + g < shape.rows) {
          ptx::red_global_add_f32(at[i] + offset * (whole(i) ? 8 : 1), pair[0]);
          ptx::red_global_add_f32(at[i] + offset * (whole(i) ? 8 : 1) + (whole(i) ? 32 : 1), pair[1]);
        }
      }
    }
  }
}

}  // namespace jax_flash2::cuda::tile
