// The online softmax of one warpgroup's rows, of which a lane holds two (the C layout of wgmma), while the product that
// adds the tile before to the output is still under way. Knows scores and sums, not where they came from.
//
// Powers are taken of y = score * unit - shift, `shift` being a score of the row in powers of two, which the row has
// seen. It is renewed only where a score passes it by kSlack_log2, because then the output must be waited for and
// rescaled. The result is exact all the same: float32 and float16 hold the powers of what lies below the slack.
#pragma once
#include <cfloat>
#include <climits>
#include <cmath>
#include <cstdint>

#include "cuda/ptx/math.cuh"
#include "cuda/sm90/config.cuh"
#include "cuda/softmax.cuh"

namespace jax_flash2::cuda::sm90 {

struct RowSoftmax {
  static constexpr float kSlack_log2 = 7.0f;
  // Past this a fused product rounded once and the product that `shift` is, rounded too, differ by what matters.
  static constexpr float kFar_log2 = 1024.0f;
  static constexpr float kUnseen = -INFINITY, kDead = FLT_MAX;  // shifts of rows without a key yet, and for good

  float unit_log2;
  float shift_log2[2];
  float sum[2];  // this lane's share
  int limit;     // y, as an integer, past which something is to be done; INT_MIN: always, a shift of the warp is far

  __device__ __forceinline__ void start(float unit, bool dead0, bool dead1) {
    unit_log2 = unit, limit = __float_as_int(kSlack_log2);
    shift_log2[0] = dead0 ? kDead : kUnseen, shift_log2[1] = dead1 ? kDead : kUnseen;
    sum[0] = sum[1] = 0;
  }

  // Each of these turns a tile's scores into their powers, and calls rescale(factors) where the output must follow.

  // For any tile.
  template <int kCols8, class Rescale>
  __device__ __forceinline__ void largest(float (&s)[kCols8][4], Rescale rescale) {
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
      top[h] = fmaxf(fmaxf(part[0], part[1]), fmaxf(part[2], part[3])) * unit_log2;
      renew |= top[h] > shift_log2[h] + kSlack_log2;
    }
    if (__any_sync(~0u, renew)) {
      float factor[2];
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const float now = fmaxf(shift_log2[h], quad_max(top[h]));
        factor[h] = now == shift_log2[h] ? 1.0f : ptx::ex2(shift_log2[h] - now);
        shift_log2[h] = now, sum[h] *= factor[h];
      }
      note_far();
      rescale(factor);
    }
#pragma unroll
    for (int x = 0; x < kCols8 * 4; x++) s[x / 4][x % 4] = fmaf(s[x / 4][x % 4], unit_log2, -base(x / 2 % 2));
    if (limit == INT_MIN) on_grid(s);
    powers(s);
  }

  // For tiles all of whose keys are kept, where every live row has seen a key. As integers, floats that are not negative
  // keep their order and stand above all negative ones: a maximum of three costs one instruction, and no look at the
  // rest of the quad.
  template <int kCols8, class Rescale>
  __device__ __forceinline__ void stale(float (&s)[kCols8][4], Rescale rescale) {
    int part[kChains];
#pragma unroll
    for (int j = 0; j < kCols8; j++) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
#pragma unroll
        for (int e = 2 * h; e < 2 * h + 2; e++) s[j][e] = fmaf(s[j][e], unit_log2, -shift_log2[h]);
        const int a = __float_as_int(s[j][2 * h]), b = __float_as_int(s[j][2 * h + 1]), c = (2 * j + h) % kChains;
        part[c] = 2 * j + h < kChains ? max(a, b) : __vimax3_s32(part[c], a, b);
      }
    }
    if (__any_sync(~0u, max(__vimax3_s32(part[0], part[1], part[2]), part[3]) > limit)) renew(s, rescale);
    powers(s);
  }

  // The same, but powers first: what they add up to tells whether the reference was too small. Scores that outgrow it by
  // more than float32 holds leave a sum that is not finite, or is made so where the shift is far: see `lost`.
  template <int kCols8, class Rescale>
  __device__ __forceinline__ void first(float (&s)[kCols8][4], Rescale rescale) {
    float now[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float part[2] = {0, 0};
#pragma unroll
      for (int x = 0; x < kCols8 * 2; x++) {
        float& y = s[x / 2][2 * h + x % 2];
        y = ptx::ex2(fmaf(y, unit_log2, -shift_log2[h]));
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
        shift_log2[h] += up, sum[h] *= factor[h], now[h] *= factor[h];
#pragma unroll
        for (int x = 0; x < kCols8 * 2; x++) s[x / 2][2 * h + x % 2] *= factor[h];
      }
      rescale(factor);
    }
    sum[0] += now[0], sum[1] += now[1];
  }
  // Whether `first` could not do the rows that `live` names.
  __device__ __forceinline__ bool lost(bool live0, bool live1) const {
    const auto bad = [&](int h) { return !(fabsf(sum[h]) < INFINITY) || fabsf(shift_log2[h]) > kFar_log2; };
    return (live0 && bad(0)) || (live1 && bad(1));
  }

  struct Row {
    float inverse;  // what the unscaled output is multiplied by
    float lse;      // natural log
  };
  __device__ __forceinline__ Row finish(int h, bool live) const {
    const float total = quad_sum(sum[h]);
    if (!live || total == 0) return {0, -INFINITY};  // not `> 0`: a NaN goes on
    return {1.0f / total, (shift_log2[h] + ptx::lg2(total)) * kLn2};
  }

 private:
  static constexpr int kChains = 4;
  static constexpr float kBig = 32768.0f;       // float16 holds what adds up to less
  static constexpr float kHopeless = 0x1p100f;  // the inverse of what is less is a normal number

  __device__ __forceinline__ float base(int h) const { return shift_log2[h] == kUnseen ? 0.0f : shift_log2[h]; }

  __device__ __forceinline__ void note_far() {
    bool far = false;
#pragma unroll
    for (int h = 0; h < 2; h++) far |= fabsf(base(h)) > kFar_log2 && shift_log2[h] != kDead;
    limit = __any_sync(~0u, far) ? INT_MIN : __float_as_int(kSlack_log2);
  }

  // y as the difference of two products, each rounded: equal scores then differ by exactly 0.
  template <int kCols8>
  __device__ __forceinline__ void on_grid(float (&y)[kCols8][4]) const {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      if (fabsf(base(h)) > kFar_log2) {
#pragma unroll
        for (int x = 0; x < kCols8 * 2; x++) {
          float& z = y[x / 2][2 * h + x % 2];
          z = (z + base(h)) - base(h);
        }
      }
    }
  }

  template <int kCols8, class Rescale>
  __device__ __forceinline__ void renew(float (&y)[kCols8][4], Rescale rescale) {
    if (limit == INT_MIN) on_grid(y);
    float factor[2];
    bool any = false;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float top = y[0][2 * h];
#pragma unroll
      for (int x = 1; x < kCols8 * 2; x++) top = fmaxf(top, y[x / 2][2 * h + x % 2]);
      top = quad_max(top);
      const float up = top > kSlack_log2 ? top : 0.0f;
      any |= up > 0;
      factor[h] = ptx::ex2(-up);
      shift_log2[h] += up, sum[h] *= factor[h];
#pragma unroll
      for (int x = 0; x < kCols8 * 2; x++) y[x / 2][2 * h + x % 2] -= up;
    }
    if (!__any_sync(~0u, any)) return;
    note_far();
    rescale(factor);
  }

  template <int kCols8>
  __device__ __forceinline__ void powers(float (&y)[kCols8][4]) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
      for (int x = 0; x < kCols8 * 2; x++) {
        float& z = y[x / 2][2 * h + x % 2];
        z = ptx::ex2(z);
        sum[h] += z;
      }
    }
  }
};

}  // namespace jax_flash2::cuda::sm90
