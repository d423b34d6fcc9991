// A float32 matrix in global memory to which the copy engine adds tiles: where each element lies. Knows no thread.
//
// Blocks of 16 rows lie one after another; in each, blocks of 8 columns, and in those the 128 elements in the order in
// which a C fragment (tile/fragment.cuh) holds them, a lane's four together. So a fragment is written to shared memory
// by one 16-byte store a lane, and what a warp has of 16 rows is contiguous. The last rows, if fewer than 16, are kept
// row by row.
#pragma once
#include <cstdint>

#include "core/spec.h"

namespace jax_flash2::cuda::tile {

struct RowBlocks {
  static constexpr int kRows = 16;
  int rows, cols;  // cols is a multiple of 8

  JAX_FLASH2_HD constexpr bool whole(int row) const { return (row | (kRows - 1)) < rows; }

  JAX_FLASH2_HD constexpr int64_t offset(int row, int col) const {
    if (!whole(row)) return int64_t(row) * cols + col;
    const int lane = (row & 7) * 4 + (col >> 1 & 3);
    return int64_t(row & ~(kRows - 1)) * cols + (col >> 3) * 128 + lane * 4 + (row >> 3 & 1) * 2 + (col & 1);
  }
};

}  // namespace jax_flash2::cuda::tile
