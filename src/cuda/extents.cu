// Reads a mask once. A block has a tile of it: threads walk down its rows, four neighbouring columns each, so that what
// they find of columns stays in registers; what a warp finds of a row is gathered in shared memory. Both are then joined
// with what other blocks find.
#include "cuda/extents.h"

#include <algorithm>

#include "cuda/launch_kernel.cuh"

namespace jax_flash2::cuda {
namespace {

constexpr int kThreads = 128, kCols = 4 * kThreads, kRows = 128, kAhead = 8;  // rows that are asked for together

struct Grid {
  int64_t rows, cols, heads, row_tiles, col_tiles;
};

// Lane x's four columns are bytes of 0 or 1.
__device__ __forceinline__ uint32_t load(const uint8_t* from, int own, bool aligned) {
  if (aligned) return __ldcs(reinterpret_cast<const uint32_t*>(from));
  uint32_t bytes = 0;
  for (int x = 0; x < own; x++) bytes |= uint32_t(from[x]) << 8 * x;
  return bytes;
}

__global__ void __launch_bounds__(kThreads)
    extents_kernel(const uint8_t* mask, const Grid grid, int32_t* by_row, int32_t* by_col) {
  __shared__ int row_first[kRows], row_end[kRows], row_count[kRows];
  const int64_t tiles = grid.row_tiles * grid.col_tiles, tile = blockIdx.x % tiles, head = blockIdx.x / tiles;
  const int64_t batch = head / grid.heads, row0 = tile / grid.col_tiles * kRows;
  const int64_t col = tile % grid.col_tiles * kCols + threadIdx.x * 4;
  const int rows = int(grid.rows - row0 < kRows ? grid.rows - row0 : kRows), lane = threadIdx.x % 32;
  const int own = int(grid.cols - col < 4 ? grid.cols - col : 4);  // columns of this thread; none: not positive
  const uint8_t* const from = mask + (head * grid.rows + row0) * grid.cols + col;
  const bool aligned = own == 4 && grid.cols % 4 == 0;  // XLA's arrays begin at multiples of 16
  for (int x = threadIdx.x; x < kRows; x += kThreads) row_first[x] = row_end[x] = row_count[x] = 0;
  __syncthreads();  // the rows are clear

  // Of each column, as it is written: less is to be done for a row that keeps what the one before does.
  int first[4] = {}, end[4] = {};
  uint32_t counts = 0, before = 0, ever = 0;  // a byte each; no count passes kRows
#pragma unroll 1
  for (int i0 = 0; i0 < rows; i0 += kAhead) {
    uint32_t ahead[kAhead];
#pragma unroll
    for (int x = 0; x < kAhead; x++) ahead[x] = i0 + x < rows ? load(from + (i0 + x) * grid.cols, own, aligned) : 0;
#pragma unroll
    for (int x = 0; x < kAhead; x++) {
      const int i = i0 + x;
      const uint32_t kept = ahead[x];
      if (kept != before) {
#pragma unroll
        for (int c = 0; c < 4; c++) {
          const uint32_t bit = 1u << 8 * c;
          if (kept & ~ever & bit) first[c] = int(grid.rows - (row0 + i));
          if (before & ~kept & bit) end[c] = int(row0 + i);
        }
        ever |= kept, before = kept;
      }
      counts += kept;
      const uint32_t some = __ballot_sync(~0u, kept != 0);
      if (some == 0) continue;
      const int count = __reduce_add_sync(~0u, __popc(kept)), leading = __ffs(some) - 1, trailing = 31 - __clz(some);
      if (lane == leading) atomicMax(&row_first[i], int(grid.cols - col) - (__ffs(kept) - 1) / 8);
      if (lane == trailing) atomicMax(&row_end[i], int(col) + (31 - __clz(kept)) / 8 + 1);
      if (lane == leading) atomicAdd(&row_count[i], count);
    }
  }
#pragma unroll
  for (int c = 0; c < 4; c++) {
    if (before >> 8 * c & 1) end[c] = int(row0 + rows);
  }
  __syncthreads();  // all warps have told what they found of the rows

  const auto join = [](int32_t* to, int64_t stride, int64_t at, int first, int end, int count) {
    if (count == 0) return;
    atomicMax(to + at, first), atomicMax(to + stride + at, end), atomicAdd(to + 2 * stride + at, count);
  };
  for (int i = threadIdx.x; i < rows; i += kThreads) {
    join(by_row + batch * 3 * grid.rows, grid.rows, row0 + i, row_first[i], row_end[i], row_count[i]);
  }
  int32_t* const to = by_col + batch * 3 * grid.cols;
#pragma unroll
  for (int c = 0; c < 4; c++) join(to, grid.cols, col + c, first[c], end[c], counts >> 8 * c & 0xff);
}

}  // namespace

Status find_extents(const uint8_t* mask, int64_t batch, int64_t heads, int64_t rows, int64_t cols, int32_t* by_row,
                    int32_t* by_col, cudaStream_t stream) {
  if (batch == 0 || heads == 0) return {};
  if (cudaMemsetAsync(by_row, 0, batch * 3 * rows * sizeof(int32_t), stream) != cudaSuccess ||
      cudaMemsetAsync(by_col, 0, batch * 3 * cols * sizeof(int32_t), stream) != cudaSuccess) {
    return {"clearing the extents of the mask failed"};
  }
  const Grid grid{rows, cols, heads, (rows + kRows - 1) / kRows, (cols + kCols - 1) / kCols};
  return launch_kernel(extents_kernel, batch * heads * grid.row_tiles * grid.col_tiles, kThreads, 0, stream, mask, grid,
                       by_row, by_col);
}

}  // namespace jax_flash2::cuda
