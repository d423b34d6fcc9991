// Reads a mask once. A block has a tile of it: threads walk down its rows, four neighbouring columns each, so that what
// they find of columns stays in registers; what a warp finds of a row is gathered in shared memory. Both are then joined
// with what other blocks find.
#include "cuda/extents.h"

#include <algorithm>

#include "cuda/launch_kernel.cuh"

namespace jax_flash2::cuda {
namespace {

constexpr int kThreads = 128, kCols = 4 * kThreads, kRows = 128;

struct Grid {
  int64_t rows, cols, heads, row_tiles, col_tiles;
};

__global__ void __launch_bounds__(kThreads)
    extents_kernel(const uint8_t* mask, const Grid grid, int32_t* by_row, int32_t* by_col) {
  __shared__ int row_first[kRows], row_end[kRows], row_count[kRows];
  const int64_t tile = blockIdx.x % (grid.row_tiles * grid.col_tiles),
                head = blockIdx.x / (grid.row_tiles * grid.col_tiles);
  const int64_t batch = head / grid.heads, row0 = tile / grid.col_tiles * kRows, col0 = tile % grid.col_tiles * kCols;
  const int64_t col = col0 + threadIdx.x * 4;
  const int rows = int(grid.rows - row0 < kRows ? grid.rows - row0 : kRows), lane = threadIdx.x % 32;
  const int own = int(grid.cols - col < 4 ? grid.cols - col : 4);  // columns of this thread; none: not positive
  const uint8_t* const from = mask + (head * grid.rows + row0) * grid.cols + col;
  const bool whole = own == 4 && grid.cols % 4 == 0 && reinterpret_cast<uintptr_t>(mask) % 4 == 0;
  for (int x = threadIdx.x; x < kRows; x += kThreads) row_first[x] = row_end[x] = row_count[x] = 0;
  __syncthreads();  // the rows are clear

  int first[4] = {}, end[4] = {}, count[4] = {};  // of the columns, as they are written
#pragma unroll 4
  for (int i = 0; i < rows; i++) {
    uint32_t kept = 0;  // a bit a column
    if (whole) {
      const uint32_t bytes = __ldcs(reinterpret_cast<const uint32_t*>(from + i * grid.cols));
      for (int x = 0; x < 4; x++) kept |= uint32_t((bytes >> 8 * x & 0xff) != 0) << x;
    } else {
      for (int x = 0; x < own; x++) kept |= uint32_t(from[i * grid.cols + x] != 0) << x;
    }
#pragma unroll
    for (int x = 0; x < 4; x++) {
      const int bit = kept >> x & 1;
      if (bit && count[x] == 0) first[x] = int(grid.rows - (row0 + i));
      if (bit) end[x] = int(row0 + i + 1);
      count[x] += bit;
    }
    const uint32_t some = __ballot_sync(~0u, kept != 0);
    if (some == 0) continue;
    const int kept_by_all = __reduce_add_sync(~0u, __popc(kept));
    const int leading = __ffs(some) - 1, trailing = 31 - __clz(some);
    const int in_first = __shfl_sync(~0u, __ffs(kept) - 1, leading),
              in_last = __shfl_sync(~0u, 31 - __clz(kept), trailing);
    if (lane == 0) {
      const int64_t warp_col = col0 + threadIdx.x * 4;
      atomicMax(&row_first[i], int(grid.cols - (warp_col + leading * 4 + in_first)));
      atomicMax(&row_end[i], int(warp_col + trailing * 4 + in_last + 1));
      atomicAdd(&row_count[i], kept_by_all);
    }
  }
  __syncthreads();  // all warps have told what they found of the rows

  const auto join = [](int32_t* to, int64_t stride, int64_t at, int first, int end, int count) {
    if (count == 0) return;
    atomicMax(to + at, first), atomicMax(to + stride + at, end), atomicAdd(to + 2 * stride + at, count);
  };
  for (int i = threadIdx.x; i < rows; i += kThreads) {
    join(by_row + batch * 3 * grid.rows, grid.rows, row0 + i, row_first[i], row_end[i], row_count[i]);
  }
#pragma unroll
  for (int x = 0; x < 4; x++) {
    if (x < own) join(by_col + batch * 3 * grid.cols, grid.cols, col + x, first[x], end[x], count[x]);
  }
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
