// What a backward does after its main kernel: float32 accumulators, in the order of tile/accumulator.cuh, become
// gradients. Bound by memory, so everything moves in 16-byte pieces. Knows no tile size and no architecture.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "core/problem.h"
#include "cuda/launch_kernel.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/accumulator.cuh"

namespace jax_flash2::cuda {

// Which gradient.
enum class Gradient { kQuery, kKey, kValue };

struct Conversion {
  Tensor acc, to;
  int rows, cols, heads;

  static Conversion make(const Problem& p, Gradient of) {
    switch (of) {
      case Gradient::kQuery: return {p.dq_acc, p.dq, p.T, p.D, p.N};
      case Gradient::kKey: return {p.dk_acc, p.dk, p.S, p.D, p.K};
      default: return {p.dv_acc, p.dv, p.S, p.Dv, p.K};
    }
  }
};

inline constexpr int kConvertPasses = 2;

// A thread writes 8 columns of a row: threadIdx = (row of its block of 8, block of 8 columns, block of 8 rows).
template <class Element, Gradient kOf>
__global__ void __launch_bounds__(256)
    convert_kernel(const __grid_constant__ Problem p, const Conversion c, int blocks_per_head) {
  const int head = blockIdx.x / blocks_per_head, h = head % c.heads;
  const Batch b = p.batch(head / c.heads);
  const Mask mask = p.mask(b);
  const Live live = kOf == Gradient::kQuery ? mask.live_queries() : mask.live_keys();
  const float scale = kOf == Gradient::kValue ? 1.0f : p.score<float>(b, h).scale;
  const tile::Accumulator shape{c.rows, c.cols};
  const float* const acc_g = c.acc.at<const float>(b, h);
  Element* const to_g = c.to.at<Element>(b, h);
  const int col = threadIdx.y * 8;
  const int row0 = (blockIdx.x % blocks_per_head * kConvertPasses * blockDim.z + threadIdx.z) * 8 + threadIdx.x;

  float4 low[kConvertPasses], high[kConvertPasses];
#pragma unroll
  for (int pass = 0; pass < kConvertPasses; pass++) {
    const int row = row0 + pass * 8 * blockDim.z;
    if (row < c.rows) {
      const float* const at = acc_g + shape.offset(row, col);  // even columns, or the first four
      low[pass] = __ldcs(reinterpret_cast<const float4*>(at));
      high[pass] = __ldcs(reinterpret_cast<const float4*>(at + (shape.whole(row) ? 32 : 4)));
    }
  }
#pragma unroll
  for (int pass = 0; pass < kConvertPasses; pass++) {
    const int row = row0 + pass * 8 * blockDim.z;
    if (row < c.rows) {
      const float4 l = low[pass], r = high[pass];
      const bool whole = shape.whole(row);
      const auto pair = [&](float x, float y) { return ptx::cvt_x2<Element>(x * scale, y * scale); };
      uint4 x;
      x.x = whole ? pair(l.x, r.x) : pair(l.x, l.y), x.y = whole ? pair(l.y, r.y) : pair(l.z, l.w);
      x.z = whole ? pair(l.z, r.z) : pair(r.x, r.y), x.w = whole ? pair(l.w, r.w) : pair(r.z, r.w);
      // Selected, not multiplied: a NaN that other rows may see must not reach a dead one.
      *reinterpret_cast<uint4*>(to_g + row * c.to.row + col) = live.has(row) ? x : uint4{};
    }
  }
}

// Each query row's share of d loss / d scale, sum_d q * dq_acc, by one warp. Reads dq_acc once more, which only calls with
// a traced scale pay for. Shape: tile::Accumulator, or another that says where elements of dq_acc lie.
template <class Element, class Shape>
__global__ void __launch_bounds__(256) scale_gradient_kernel(const __grid_constant__ Problem p) {
  const int64_t row = (int64_t(blockIdx.x) * 256 + threadIdx.x) / 32;
  if (row >= int64_t(p.B) * p.N * p.T) return;
  const int t = row % p.T, n = row / p.T % p.N, lane = threadIdx.x % 32;
  const Batch b = p.batch(row / p.T / p.N);
  const Shape shape{p.T, p.D};
  float sum = 0;
  if (p.mask(b).live_queries().has(t)) {
    const Element* const q = p.q.at<const Element>(b, n) + t * p.q.row;
    for (int d = lane; d < p.D; d += 32) sum += float(q[d]) * p.dq_acc.at<const float>(b, n)[shape.offset(t, d)];
#pragma unroll
    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
  }
  if (lane == 0) p.grads.scale.at<float>(b, n)[t * p.grads.scale.row] = sum;
}

template <class Element, class Shape>
Status scale_gradient(const Problem& p, cudaStream_t stream) {
  if (!p.grads.scale.present()) return {};
  const int64_t blocks = (int64_t(p.B) * p.N * p.T + 7) / 8;  // of 8 warps
  return launch_kernel(scale_gradient_kernel<Element, Shape>, blocks, 256, 0, stream, p);
}

template <class Element, Gradient kOf>
Status convert(const Problem& p, cudaStream_t stream) {
  const Conversion c = Conversion::make(p, kOf);
  const int chunks = c.cols / 8;
  const dim3 threads(8, chunks, 32 / chunks > 0 ? 32 / chunks : 1);
  const int rows_per_block = kConvertPasses * threads.z * 8;
  const int per_head = (c.rows + rows_per_block - 1) / rows_per_block;
  const int64_t blocks = int64_t(p.B) * c.heads * per_head;
  const Status s = launch_kernel(convert_kernel<Element, kOf>, blocks, threads, 0, stream, p, c, per_head);
  if (!s.ok()) return s;
  return kOf == Gradient::kQuery ? scale_gradient<Element, tile::Accumulator>(p, stream) : Status{};
}

}  // namespace jax_flash2::cuda
