// What a backward does before its main kernel: delta = rowsum(dout * out) - dlse, the gradient of a sink, which follows
// from it, and cleared workspaces: the accumulators and the turns of a deterministic backward. Bound by memory, so
// everything moves in 16-byte pieces and one kernel does nearly all. Knows no tile size and no architecture.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "core/problem.h"
#include "cuda/launch_kernel.cuh"

namespace jax_flash2::cuda {

template <class Element>
__device__ __forceinline__ float2 to_float2(uint32_t pair) {
  if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
  } else {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  }
}

// Of query i, whose rowsum(dout * out) is `sum`: writes delta, which it returns, and its share of the sink's gradient.
template <class Real>
__device__ __forceinline__ Real write_delta(const Problem& p, const Batch& b, int n, int i, bool live, Real sum) {
  if (!live) sum = 0;  // a dead row may hold NaN
  const Real dlse = p.dlse.present() ? p.dlse.at<const Real>(b, n)[i * p.dlse.row] : Real(0);
  const Real delta = live ? sum - dlse : Real(0);
  p.delta.at<Real>(b, n)[i * p.delta.row] = delta;
  if (p.grads.sinks.present()) {  // a row without keys has an lse all the same
    const Real lse = p.lse.at<const Real>(b, n)[i * p.lse.row];
    const Real share = exp(p.sink<Real>(b, n) - lse) * (dlse - sum);
    p.grads.sinks.at<Real>(b, n)[i * p.grads.sinks.row] = lse == -INFINITY ? Real(0) : share;
  }
  return delta;
}

inline constexpr int kDeltaThreads = 256, kDeltaPasses = 4;

// kLanes lanes share a row of at most 8 kLanes columns. A block takes kRows rows of one batch row, in the order in which
// they lie in memory (t, then n), and clears as many rows' worth of dq_acc, wherever that is.
template <class Element, int kLanes>
__global__ void __launch_bounds__(kDeltaThreads) delta_kernel(const __grid_constant__ Problem p, int blocks_per_batch) {
  constexpr int kStep = kDeltaThreads / kLanes, kRows = kStep * kDeltaPasses;
  const Batch b = p.batch(blockIdx.x / blocks_per_batch);
  const int64_t row0 = int64_t(blockIdx.x % blocks_per_batch) * kRows, rows = int64_t(p.T) * p.N;
  const int t0 = row0 / p.N, n0 = row0 % p.N;
  const int chunk = threadIdx.x % kLanes * 8;
  const Element* const out_g = p.out.at<const Element>(b) + chunk;
  const Element* const dout_g = p.dout.at<const Element>(b) + chunk;

  uint4 out[kDeltaPasses], dout[kDeltaPasses];
#pragma unroll
  for (int pass = 0; pass < kDeltaPasses; pass++) {
    const int local = threadIdx.x / kLanes + pass * kStep;
    const int t = t0 + (n0 + local) / p.N, n = (n0 + local) % p.N;
    out[pass] = dout[pass] = {};
    if (row0 + local < rows && chunk < p.Dv) {
      out[pass] = *reinterpret_cast<const uint4*>(out_g + n * p.out.head + t * p.out.row);
      dout[pass] = *reinterpret_cast<const uint4*>(dout_g + n * p.dout.head + t * p.dout.row);
    }
  }

  const int64_t cleared = int64_t(kRows) * p.D, total = int64_t(p.B) * p.N * p.T * p.D;
  const int64_t begin = blockIdx.x * cleared, end = begin + cleared < total ? begin + cleared : total;
  float* const dq_acc = static_cast<float*>(p.dq_acc.data);
  for (int64_t x = begin + threadIdx.x * 4; x < end; x += kDeltaThreads * 4) {
    *reinterpret_cast<float4*>(dq_acc + x) = float4{};
  }
  if (p.order.present()) {
    for (int64_t x = int64_t(blockIdx.x) * kDeltaThreads + threadIdx.x; x < p.counters();
         x += int64_t(gridDim.x) * kDeltaThreads) {
      static_cast<int*>(p.order.data)[x] = 0;
    }
  }

  const Live live = p.mask(b).live_queries();
#pragma unroll
  for (int pass = 0; pass < kDeltaPasses; pass++) {
    const uint32_t* const x = &out[pass].x;
    const uint32_t* const y = &dout[pass].x;
    float sum = 0;
#pragma unroll
    for (int c = 0; c < 4; c++) {
      const float2 u = to_float2<Element>(x[c]), w = to_float2<Element>(y[c]);
      sum = fmaf(u.x, w.x, fmaf(u.y, w.y, sum));
    }
#pragma unroll
    for (int d = kLanes / 2; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
    const int local = threadIdx.x / kLanes + pass * kStep;
    if (row0 + local < rows && threadIdx.x % kLanes == 0) {
      const int t = t0 + (n0 + local) / p.N, n = (n0 + local) % p.N;
      write_delta(p, b, n, t, live.has(t), sum);
    }
  }
}

// Fills p.delta and clears p.dq_acc and p.order; with `keys` p.dk_acc and p.dv_acc too.
template <class Element>
Status delta(const Problem& p, bool keys, cudaStream_t stream) {
  if (keys) {
    const size_t bytes = size_t(p.B) * p.K * p.S * sizeof(float);
    if (cudaMemsetAsync(p.dk_acc.data, 0, bytes * p.D, stream) != cudaSuccess ||
        cudaMemsetAsync(p.dv_acc.data, 0, bytes * p.Dv, stream) != cudaSuccess) {
      return {"clearing the accumulators of dk and dv failed"};
    }
  }
  const auto launch = [&](auto lanes) {
    constexpr int kLanes = lanes, kRows = kDeltaThreads / kLanes * kDeltaPasses;
    const int64_t per_batch = (int64_t(p.T) * p.N + kRows - 1) / kRows, blocks = per_batch * p.B;
    return launch_kernel(delta_kernel<Element, kLanes>, blocks, kDeltaThreads, 0, stream, p, int(per_batch));
  };
  if (p.Dv <= 64) return launch(std::integral_constant<int, 8>{});
  if (p.Dv <= 128) return launch(std::integral_constant<int, 16>{});
  return launch(std::integral_constant<int, 32>{});
}

}  // namespace jax_flash2::cuda
