// The online softmax over score fragments, for rows that a quad of lanes shares (the C layout of tile/fragment.cuh).
// Knows scores and sums, not where they came from: scores arrive masked (-inf) and in one unit, `log2_unit` of which is
// what turns them into powers of two.
//
// A row's reference is a score that it has seen, not always its largest: it is renewed only where a score passes it by
// kSlack_log2, because renewing costs a product for every output register. The result is exact all the same, for
// exp2(s - reference) then stays below 2^(2 kSlack_log2), which both float32 and float16 hold.
#pragma once
#include <cfloat>
#include <cmath>
#include <cstdint>

#include "cuda/ptx/math.cuh"
#include "cuda/score.cuh"
#include "cuda/tile/fragment.cuh"

namespace jax_flash2::cuda {

// The larger of a quad's values, and their sum, in all four lanes.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// What a row comes to.
struct RowEnd {
  float inverse;  // what the unscaled output is multiplied by
  float lse;      // natural log
};

// kRowBlocks blocks of 16 rows; of each a lane holds rows g and g + 8.
template <int kRowBlocks>
struct Softmax {
  static constexpr float kSlack_log2 = 7.0f;
  static constexpr float kUnseen = -FLT_MAX;  // reference of a row that has seen no key: finite, so -inf - it is -inf
  // Past this the product reference * log2_unit, rounded, no longer gives the largest score the exponent 0 that P's
  // rounding needs, and scores are subtracted before they are scaled.
  static constexpr float kFar_log2 = 1024.0f;

  float log2_unit;                 // positive
  float reference[kRowBlocks][2];  // the same in a quad
  float sum[kRowBlocks][2];        // this lane's share of the sum of powers
  float shift_log2[kRowBlocks][2];

  __device__ __forceinline__ explicit Softmax(float unit) : log2_unit(unit) {
#pragma unroll
    for (int i = 0; i < kRowBlocks; i++) {
#pragma unroll
      for (int h = 0; h < 2; h++) reference[i][h] = kUnseen, sum[i][h] = 0;
    }
  }

  // Takes note of a tile of scores before `power` is asked for theirs. Rescales `out`, and in the far case moves `s`.
  // Row blocks below kFirst are left alone.
  template <int kFirst, int kCols8, int kOutCols8>
  __device__ __forceinline__ void meet(float (&s)[kRowBlocks][kCols8][4], float (&out)[kRowBlocks][kOutCols8][4]) {
    float top[kRowBlocks][2];
    bool renew = false;
#pragma unroll
    for (int i = kFirst; i < kRowBlocks; i++) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        top[i][h] = fmaxf(s[i][0][2 * h], s[i][0][2 * h + 1]);
#pragma unroll
        for (int j = 1; j < kCols8; j++) top[i][h] = fmaxf(top[i][h], fmaxf(s[i][j][2 * h], s[i][j][2 * h + 1]));
        shift_log2[i][h] = reference[i][h] * log2_unit;
        renew |= fmaf(top[i][h], log2_unit, -shift_log2[i][h]) > kSlack_log2 || fabsf(shift_log2[i][h]) > kFar_log2;
      }
    }
    if (!__any_sync(~0u, renew)) return;

    bool far = false;
#pragma unroll
    for (int i = kFirst; i < kRowBlocks; i++) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const float now = fmaxf(reference[i][h], quad_max(top[i][h]));
        const float factor = ptx::ex2((reference[i][h] - now) * log2_unit);
        reference[i][h] = now;
        sum[i][h] *= factor;
        shift_log2[i][h] = now * log2_unit;
        far |= fabsf(shift_log2[i][h]) > kFar_log2;
#pragma unroll
        for (int j = 0; j < kOutCols8; j++) out[i][j][2 * h] *= factor, out[i][j][2 * h + 1] *= factor;
      }
    }
    if (!__any_sync(~0u, far)) return;

#pragma unroll
    for (int i = kFirst; i < kRowBlocks; i++) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        shift_log2[i][h] = 0;
#pragma unroll
        for (int j = 0; j < kCols8; j++) s[i][j][2 * h] -= reference[i][h], s[i][j][2 * h + 1] -= reference[i][h];
      }
    }
  }

  // The power of one score, added to its row's sum.
  __device__ __forceinline__ float power(float s, int i, int h) {
    const float p = ptx::ex2(fmaf(s, log2_unit, -shift_log2[i][h]));
    sum[i][h] += p;
    return p;
  }

  // kNatural: the unit is that of natural scores, and even the lowest one has an lse.
  template <bool kNatural = false>
  __device__ __forceinline__ RowEnd finish(int i, int h) const {
    const float total = quad_sum(sum[i][h]);
    if (total == 0) return {0, -INFINITY};  // not `> 0`: a NaN goes on
    if constexpr (kNatural) return {1.0f / total, reference[i][h] + ptx::lg2(total) * kLn2};
    return {1.0f / total, (reference[i][h] * log2_unit + ptx::lg2(total)) * kLn2};
  }
};

// A row's end when one more key, of score `sink` and without a value, takes part. -INFINITY: there is none.
__device__ __forceinline__ RowEnd with_sink(RowEnd end, float sink) {
  if (sink == -INFINITY) return end;
  if (end.lse == -INFINITY) return {0, sink};  // no key beside it
  const float top = fmaxf(end.lse, sink), keys = ptx::ex2((end.lse - top) * kLog2e);
  const float total = keys + ptx::ex2((sink - top) * kLog2e);
  return {end.inverse * keys / total, top + ptx::lg2(total) * kLn2};
}

}  // namespace jax_flash2::cuda
