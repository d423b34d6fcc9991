// The operands of a batch row and a query head, as kernels ask them of the pairs that a lane holds.
#pragma once
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "core/problem.h"
#include "cuda/tile/columns.cuh"

namespace jax_flash2::cuda {

// Pairs that one lane holds in a row of C fragments: query i and key j, and of the same query other keys, or of the same
// key other queries, as tile/columns.cuh says.
template <bool kAlongKeys, int kPairs>
struct Line {
  static_assert(kPairs <= 32);
  int i, j;

  __device__ __forceinline__ int query(int x) const { return kAlongKeys ? i : i + tile::column_step(x); }
  __device__ __forceinline__ int key(int x) const { return kAlongKeys ? j + tile::column_step(x) : j; }
  // Where pair x lies in an array of these strides.
  __device__ __forceinline__ int64_t place(int x, int64_t row, int64_t col) const {
    return i * row + j * col + tile::column_step(x) * (kAlongKeys ? col : row);
  }
};

// How far the queries of a line's pairs stand from their keys, of those that `pairs` names: of others any number.
template <bool kAlongKeys, int kPairs>
__device__ __forceinline__ void find_distances(const Addend<float>& addend, const Line<kAlongKeys, kPairs>& line,
                                               uint32_t pairs, float (&to)[kPairs]) {
  if (!kAlongKeys && addend.positions) {
#pragma unroll
    for (int x = 0; x < kPairs; x++) to[x] = pairs >> x & 1 ? addend.distance(line.query(x), line.key(x)) : 0.0f;
    return;
  }
  const int at = (!addend.positions ? line.i + addend.off : pairs ? addend.positions[line.i] : 0) - line.j;
#pragma unroll
  for (int x = 0; x < kPairs; x++) {
    to[x] = fabsf(static_cast<float>(at + (kAlongKeys ? -tile::column_step(x) : tile::column_step(x))));
  }
}

// Multiplies two neighbouring C fragments by what dropout keeps of them; query i and key j are the lane's first.
__device__ __forceinline__ void drop(const Dropout<float>& dropout, int i, int j, float (&left)[4], float (&right)[4]) {
#pragma unroll
  for (int e = 0; e < 2; e++) {  // what one block of random words decides
    const uint32_t kept = dropout.kept(i, j + e);
#pragma unroll
    for (int x = 0; x < 4; x++) (x % 2 ? right : left)[e + x / 2 * 2] *= kept >> x & 1 ? dropout.scale : 0.0f;
  }
}

// Lies in shared memory where registers are full.
struct Operands {
  Mask mask;
  Addend<float> addend;
  Dropout<float> dropout;
  bool adds;  // whether `addend` does anything

  __device__ __forceinline__ void set_head(const Problem& p, const Batch& b, int n) {
    addend = p.addend<float>(b, n, mask), dropout = p.dropout<float>(b, n), adds = p.has_addend(mask);
  }

  // Adds to score(x) what operands do, of the pairs that `pairs` names, and returns those that they leave: the scores of
  // others are any number. One operand after the other, so that each is asked for once, and its elements together.
  template <bool kAlongKeys, int kPairs, class Score>
  __device__ __forceinline__ uint32_t add(const Line<kAlongKeys, kPairs>& line, uint32_t pairs,
                                          const Score& score) const {
    if (addend.mask || addend.query_ids) {
      pairs = tile::columns_left(pairs, kAlongKeys ? line.j : line.i, [&](int at) {
        return kAlongKeys ? addend.keeps(line.i, at) : addend.keeps(at, line.j);
      });
    }
    if (addend.bias) {
      float added[kPairs];
      addend.with_bias_dtype([&]<DType kDType>() {
#pragma unroll
        for (int x = 0; x < kPairs; x++) {
          const int64_t at = line.place(x, addend.bias_row, addend.bias_col);
          added[x] = pairs >> x & 1 ? addend.template bias_at<kDType>(at) : 0.0f;
        }
      });
#pragma unroll
      for (int x = 0; x < kPairs; x++) score(x) += added[x], pairs &= ~(uint32_t(added[x] == -INFINITY) << x);
    }
    if (addend.sloped) {
      float distance[kPairs];
      find_distances(addend, line, pairs, distance);
#pragma unroll
      for (int x = 0; x < kPairs; x++) score(x) -= addend.slope * distance[x];
    }
    return pairs;
  }

  // The same, to sums(x) from 0 on. Called, not inlined, where registers are full: sums lie in local memory.
  template <bool kAlongKeys, int kPairs>
  __device__ __noinline__ uint32_t sum(Line<kAlongKeys, kPairs> line, uint32_t pairs, float* sums) const {
    float own[kPairs] = {};
    pairs = add(line, pairs, [&](int x) -> float& { return own[x]; });
#pragma unroll
    for (int x = 0; x < kPairs; x++) sums[x] = own[x];
    return pairs;
  }

  // What dropout keeps of a line along queries, and of that 8 keys further on. Query and key have bit 3 clear.
  template <int kPairs>
  __device__ __forceinline__ void keep(const Line<false, kPairs>& line, uint32_t (&pairs)[2]) const {
    pairs[0] = pairs[1] = ~0u;
    if (!dropout.present()) return;
    pairs[0] = pairs[1] = 0;
#pragma unroll
    for (int x = 0; x < kPairs; x += x % 2 ? 3 : 1) {  // 0 1 4 5 8 9 ..: the pair x + 2 is 8 queries further on
      const uint32_t kept = this->kept(line.query(x), line.key(x));
#pragma unroll
      for (int h = 0; h < 2; h++) pairs[h] |= (kept >> h & 1) << x | (kept >> (h + 2) & 1) << (x + 2);
    }
  }

 private:
  // Called, not inlined: its rounds at each of a tile's pairs take minutes to compile.
  __device__ __noinline__ uint32_t kept(int i, int j) const { return dropout.kept(i, j); }
};

}  // namespace jax_flash2::cuda
