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
  bool adds;  // whether `addend` does anything

  __device__ __forceinline__ void set_head(const Problem& p, const Batch& b, int n) {
    addend = p.addend<float>(b, n, mask), dropout = p.dropout<float>(b, n), adds = p.has_addend(mask);
  }

  // What follows is called, not inlined: the code of every operand at every element of a tile would take registers from
  // products, and minutes to compile.

  // What operands add to the score of a pair; -inf: it is removed. Spans are not asked.
  __device__ __noinline__ float added(int i, int j) const {
    return mask.without_spans().visible(i, j) ? addend.at(i, j) : -INFINITY;
  }
  // What dropout keeps of four pairs, see Dropout.
  __device__ __noinline__ uint32_t kept(int i, int j) const { return dropout.kept(i, j); }
};

}  // namespace jax_flash2::cuda
