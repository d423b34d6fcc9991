// What bodies that ask operands know of a batch row and a query head. It lies in shared memory, for registers are full.
#pragma once
#include <cuda_runtime.h>

#include <cmath>

#include "core/problem.h"

namespace jax_flash2::cuda {

struct Operands {
  Mask mask;
  Addend<float> addend;
  Dropout<float> dropout;

  __device__ __forceinline__ void set_head(const Problem& p, const Batch& b, int n) {
    addend = p.addend<float>(b, n, mask), dropout = p.dropout<float>(b, n);
  }

  // What operands add to the score of a pair; -inf: it is removed. Spans are not asked. Called, not inlined, for the code
  // of every operand at every element of a tile would take registers from products.
  __device__ __noinline__ float added(int i, int j) const {
    return mask.without_spans().visible(i, j) ? addend.at(i, j) : -INFINITY;
  }
};

}  // namespace jax_flash2::cuda
