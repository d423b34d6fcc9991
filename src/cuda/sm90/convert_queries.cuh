// What the backward does after its main kernel: dq_acc, in the order of tile/row_blocks.cuh, becomes dq. Bound by
// memory, so everything moves in 16-byte pieces. Knows no tile of queries.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "core/problem.h"
#include "cuda/convert.cuh"
#include "cuda/launch_kernel.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/row_blocks.cuh"

namespace jax_flash2::cuda::sm90 {

inline constexpr int kConvertThreads = 256;

// A thread has 8 columns of two rows that are 8 apart: 64 bytes of whole blocks. Threads are numbered through the rows
// of a block of 8, then its columns, then the blocks of a head.
template <class Element>
__global__ void __launch_bounds__(kConvertThreads)
    convert_queries_kernel(const __grid_constant__ Problem p, int blocks_per_head) {
  constexpr int kRows = tile::RowBlocks::kRows;
  const int head = blockIdx.x / blocks_per_head, n = head % p.N;
  const int item = blockIdx.x % blocks_per_head * kConvertThreads + threadIdx.x;
  const int row = item / p.D * kRows + item % 8, col = item % p.D / 8 * 8;
  if (row >= p.T) return;
  const Batch b = p.batch(head / p.N);
  const tile::RowBlocks shape{p.T, p.D};
  const float* const acc = p.dq_acc.at<const float>(b, n);

  float x[2][8];
  if (shape.whole(row)) {
    const float4* const from = reinterpret_cast<const float4*>(acc + shape.offset(row, col));
#pragma unroll
    for (int pair = 0; pair < 4; pair++) {
      const float4 y = __ldcs(from + pair);
      x[0][2 * pair] = y.x, x[0][2 * pair + 1] = y.y, x[1][2 * pair] = y.z, x[1][2 * pair + 1] = y.w;
    }
  } else {
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
      for (int c = 0; c < 8; c++) x[h][c] = row + 8 * h < p.T ? acc[shape.offset(row + 8 * h, col + c)] : 0.0f;
    }
  }
  const Live live = p.mask(b).live_queries();
  const float scale = p.score<float>(b, n).scale;
  Element* const dq = p.dq.at<Element>(b, n) + col;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    if (row + 8 * h >= p.T) continue;
    const auto pair = [&](int c) { return ptx::cvt_x2<Element>(x[h][c] * scale, x[h][c + 1] * scale); };
    // Selected, not multiplied: a NaN that other rows may see must not reach a dead one.
    const uint4 y = live.has(row + 8 * h) ? uint4{pair(0), pair(2), pair(4), pair(6)} : uint4{};
    *reinterpret_cast<uint4*>(dq + (row + 8 * h) * p.dq.row) = y;
  }
}

template <class Element>
Status convert_queries(const Problem& p, cudaStream_t stream) {
  const int64_t items = (int64_t(p.T) + tile::RowBlocks::kRows - 1) / tile::RowBlocks::kRows * p.D;
  const int64_t per_head = (items + kConvertThreads - 1) / kConvertThreads, blocks = per_head * p.B * p.N;
  if (blocks > INT32_MAX) return {"more query rows than one launch can take"};
  const Status s = launch_kernel(convert_queries_kernel<Element>, blocks, kConvertThreads, 0, stream, p, int(per_head));
  return s.ok() ? scale_gradient<Element, tile::RowBlocks>(p, stream) : s;
}

}  // namespace jax_flash2::cuda::sm90
