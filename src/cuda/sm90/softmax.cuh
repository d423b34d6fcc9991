// The online softmax of one warpgroup's rows, of which a lane holds two (the C layout of wgmma), while the product that
// adds the tile before to the output is still under way. Knows scores and sums, not where they came from.
//
// Powers are taken of y = score * unit - shift, `shift` being the largest score, in powers of two, of the first tile in
// which the row saw a key. Later tiles do not look for a maximum: what their powers add up to tells whether the shift has
// become too small, and it then grows by a power of two. Scores that outgrow it by more than float32 holds within one tile
// leave a sum that is not finite, and the caller does that tile of queries again, exactly. So every result is a function of
// its tile alone, and exact: float32 and float16 hold the powers of what lies below.
#pragma once
#include <cfloat>
#include <cmath>
#include <cstdint>

#include "cuda/ptx/math.cuh"
#include "cuda/softmax.cuh"

namespace jax_flash2::cuda::sm90 {

// kNatural: shifts are scores, and not powers of two, so that those near the lowest number stay numbers. For bodies whose
// operands may bring such; the others save an instruction a score.
template <bool kNatural>
struct RowSoftmax {
  static constexpr float kSlack_log2 = 7.0f;
  // Past this a fused product rounded once and the product that `shift` is, rounded too, differ by what matters.
  static constexpr float kFar_log2 = 1024.0f;
  static constexpr float kUnseen = -INFINITY, kDead = FLT_MAX;  // shifts of rows without a key yet, and for good

  float unit_log2;  // turns scores into powers of two
  float shift[2];   // in powers of two, or natural
  float sum[2];     // this lane's share

  __device__ __forceinline__ void start(float unit, bool dead0, bool dead1) {
    unit_log2 = unit;
    shift[0] = dead0 ? kDead : kUnseen, shift[1] = dead1 ? kDead : kUnseen;
    sum[0] = sum[1] = 0;
  }

  // Both turn a tile's scores into their powers, and call rescale(factors) where the output must follow.

  // For any tile: the shift follows the largest score, but for a slack that saves most rescaling. In the first tile
  // nothing has been summed.
  template <bool kFirst, int kCols8, class Rescale>
  __device__ __forceinline__ void exact(float (&s)[kCols8][4], Rescale rescale) {
    float top[2];
    bool renew = false;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float part[kChains];  // several, for a single chain would wait for itself
#pragma unroll
      for (int j = 0; j < kCols8; j++) {
        const float pair = fmaxf(s[j][2 * h], s[j][2 * h + 1]);
        part[j % kChains] = j < kChains ? pair : fmaxf(part[j % kChains], pair);
      }
      top[h] = fmaxf(fmaxf(part[0], part[1]), fmaxf(part[2], part[3])) * (kNatural ? 1.0f : unit_log2);
      renew |= top[h] > shift[h] + (kNatural ? kSlack_log2 * kLn2 : kSlack_log2);
    }
    if (__any_sync(~0u, renew)) {
      float factor[2];
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const float now = fmaxf(shift[h], quad_max(top[h]));
        factor[h] = now == shift[h] ? 1.0f : ptx::ex2((shift[h] - now) * (kNatural ? unit_log2 : 1.0f));
        shift[h] = now, sum[h] *= factor[h];
      }
      if constexpr (!kFirst) rescale(factor);
    }
#pragma unroll
    for (int x = 0; x < kCols8 * 4; x++) s[x / 4][x % 4] = shifted(s[x / 4][x % 4], base(x / 2 % 2));
    if constexpr (!kNatural) on_grid(s);
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
      for (int x = 0; x < kCols8 * 2; x++) {
        float& y = s[x / 2][2 * h + x % 2];
        y = ptx::ex2(y);
        sum[h] += y;
      }
    }
  }

  // For tiles all of whose keys are kept, where every live row has seen a key.
  template <int kCols8, class Rescale>
  __device__ __forceinline__ void fast(float (&s)[kCols8][4], Rescale rescale) {
    float now[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float part[2] = {0, 0};
#pragma unroll
      for (int x = 0; x < kCols8 * 2; x++) {
        float& y = s[x / 2][2 * h + x % 2];
        y = ptx::ex2(shifted(y, shift[h]));
        part[x % 2] += y;
      }
      now[h] = part[0] + part[1];
    }
    if (__any_sync(~0u, !(fmaxf(now[0], now[1]) < kBig))) {
      float factor[2];
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const float top = quad_max(now[h]);
        const bool hopeless = !(top < kHopeless);
        const float up = top < kBig || hopeless ? 0.0f : floorf(ptx::lg2(top));
        factor[h] = ptx::ex2(-up);
        if (hopeless) now[h] = INFINITY;
        shift[h] += kNatural ? up * kLn2 : up, sum[h] *= factor[h], now[h] *= factor[h];
#pragma unroll
        for (int x = 0; x < kCols8 * 2; x++) s[x / 2][2 * h + x % 2] *= factor[h];
      }
      rescale(factor);
    }
    sum[0] += now[0], sum[1] += now[1];
  }
  // Whether `fast` could not do the rows that `live` names.
  __device__ __forceinline__ bool lost(bool live0, bool live1) const {
    const auto bad = [&](int h) { return !(fabsf(sum[h]) < INFINITY) || far(h); };
    return (live0 && bad(0)) || (live1 && bad(1));
  }

  __device__ __forceinline__ RowEnd finish(int h, bool live) const {
    const float total = quad_sum(sum[h]);
    if (!live || total == 0) return {0, -INFINITY};  // not `> 0`: a NaN goes on
    if constexpr (kNatural) return {1.0f / total, shift[h] + ptx::lg2(total) * kLn2};
    return {1.0f / total, (shift[h] + ptx::lg2(total)) * kLn2};
  }

 private:
  static constexpr int kChains = 4;
  static constexpr float kBig = 32768.0f;       // float16 holds what adds up to less
  static constexpr float kHopeless = 0x1p100f;  // the inverse of what is less is a normal number

  __device__ __forceinline__ float shifted(float score, float by) const {
    return kNatural ? (score - by) * unit_log2 : fmaf(score, unit_log2, -by);
  }
  __device__ __forceinline__ float base(int h) const { return shift[h] == kUnseen ? 0.0f : shift[h]; }

  __device__ __forceinline__ bool far(int h) const { return fabsf(base(h)) > kFar_log2 && shift[h] != kDead; }

  // y as the difference of two products, each rounded: equal scores then differ by exactly 0.
  template <int kCols8>
  __device__ __forceinline__ void on_grid(float (&y)[kCols8][4]) const {
    if (!__any_sync(~0u, far(0) || far(1))) return;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      if (far(h)) {
#pragma unroll
        for (int x = 0; x < kCols8 * 2; x++) {
          float& z = y[x / 2][2 * h + x % 2];
          z = (z + base(h)) - base(h);
        }
      }
    }
  }
};

}  // namespace jax_flash2::cuda::sm90
