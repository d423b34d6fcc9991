// From a warpgroup's accumulators (the C layout of wgmma) straight to out and lse: neighbouring lanes swap halves of two
// blocks of 8 columns, so that a quad writes 32 bytes of a row at once. No buffer in shared memory, nobody to wait for.
#pragma once
#include <cstdint>

#include "core/problem.h"
#include "cuda/ptx/math.cuh"
#include "cuda/sm90/softmax.cuh"

namespace jax_flash2::cuda::sm90 {

// Rows `row` and `row` + 8 of this lane's quad, see Work for packed heads and for the offsets.
template <class Element, int kOut8>
__device__ __forceinline__ void write_rows(const Problem& p, int64_t out_offset, int64_t lse_offset, int pack_log2,
                                           int row, const float (&out)[kOut8][4], const RowEnd (&ends)[2]) {
  static_assert(kOut8 % 2 == 0);
  const int lane = threadIdx.x % 4, odd = lane % 2, first_column = odd * 8 + lane / 2 * 4;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int query = (row + 8 * h) >> pack_log2, n = (row + 8 * h) - (query << pack_log2);
    const bool exists = query < p.T;
    Element* const out_g = static_cast<Element*>(p.out.data) + (out_offset + query * p.out.row + n * p.out.head);
    if (lane == 0 && exists) {
      static_cast<float*>(p.lse.data)[lse_offset + query * p.lse.row + n * p.lse.head] = ends[h].lse;
    }
#pragma unroll
    for (int j = 0; j < kOut8; j += 2) {
      uint32_t words[2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        words[i] = ptx::cvt_x2<Element>(out[j + i][2 * h] * ends[h].inverse, out[j + i][2 * h + 1] * ends[h].inverse);
      }
      const uint32_t other = __shfl_xor_sync(~0u, odd ? words[0] : words[1], 1);
      (odd ? words[0] : words[1]) = other;
      const int column = j * 8 + first_column;
      if (exists && column < p.Dv) *reinterpret_cast<uint2*>(out_g + column) = uint2{words[0], words[1]};
    }
  }
}

}  // namespace jax_flash2::cuda::sm90
