// Who sees whom. `visible` is the law; every range below is derived from it, and tests/cpp proves each against it.
// Knows integers only: a mask never touches memory, so it is the same object in every backend and both passes.
#pragma once
#include "core/spec.h"

namespace jax_flash2 {

// T and S stay below this, so that sums of three positions fit an int32.
inline constexpr int kMaxLength = 1 << 29;

JAX_FLASH2_HD constexpr int min_(int a, int b) { return a < b ? a : b; }
JAX_FLASH2_HD constexpr int max_(int a, int b) { return a > b ? a : b; }
JAX_FLASH2_HD constexpr int clamp_(int x, int lo, int hi) { return min_(max_(x, lo), hi); }

struct Range {  // [begin, end), empty when begin >= end
  int begin, end;
  JAX_FLASH2_HD constexpr bool has(int x) const { return begin <= x && x < end; }
};

// The tiles that a tile of the other side meets: some elements kept in [begin, full_begin) and [full_end, end), and in
// [full_begin, full_end) every live query of the tile sees every key, so no mask is needed there.
// Always begin <= full_begin <= full_end <= end; begin == end: nothing to do.
struct Tiles {
  int begin, full_begin, full_end, end;
};

struct Mask {
  int q_len, k_len;  // clamped to [0, T] and [0, S]
  int left, right;   // clamped to [0, kMaxLength]
  int off;           // query i stands at key position i + off

  static JAX_FLASH2_HD Mask make(const Spec& spec, int q_len, int k_len) {
    auto bound = [](int64_t w) { return w < 0 || w > kMaxLength ? kMaxLength : static_cast<int>(w); };
    return {q_len, k_len, bound(spec.window_left), bound(spec.window_right), spec.bottom_right ? k_len - q_len : 0};
  }

  JAX_FLASH2_HD constexpr bool visible(int i, int j) const {
    return i < q_len && j < k_len && i + off - left <= j && j <= i + off + right;
  }

  // Keys that query i sees, and queries that see key j.
  JAX_FLASH2_HD constexpr Range keys(int i) const {
    return {max_(0, i + off - left), i < q_len ? min_(k_len, i + off + right + 1) : 0};
  }
  JAX_FLASH2_HD constexpr Range queries(int j) const {
    return {max_(0, j - off - right), j < k_len ? min_(q_len, j - off + left + 1) : 0};
  }

  // Queries that see a key at all, and keys that a query sees at all. Everything outside may hold NaN and is never read:
  // kernels load it as zero, write zero for it, and treat a dead query's lse as +inf in the backward.
  JAX_FLASH2_HD constexpr Range live_queries() const {
    return {max_(0, -off - right), k_len > 0 ? min_(q_len, k_len - off + left) : 0};
  }
  JAX_FLASH2_HD constexpr Range live_keys() const {
    return {max_(0, off - left), q_len > 0 ? min_(k_len, q_len + off + right) : 0};
  }

  // Tiles of `size` keys that the queries [i0, i1) meet.
  JAX_FLASH2_HD constexpr Tiles key_tiles(int i0, int i1, int size) const {
    const Range live = live_queries();
    const int a = max_(i0, live.begin), b = min_(i1, live.end) - 1;  // first and last live query
    if (a > b) return {0, 0, 0, 0};
    return tiles(keys(a).begin, keys(b).end, max_(0, b + off - left), min_(k_len, a + off + right + 1), size);
  }

  // Tiles of `size` queries that meet the keys [j0, j1). A tile whose keys reach past the last key is never full.
  JAX_FLASH2_HD constexpr Tiles query_tiles(int j0, int j1, int size) const {
    const Range live = live_keys();
    const int a = max_(j0, live.begin), b = min_(j1, live.end) - 1;
    if (a > b) return {0, 0, 0, 0};
    int full_begin = 0, full_end = 0;
    if (j1 <= k_len) {  // dead queries count as full, so the range may grow over them
      const Range queries_live = live_queries();
      full_begin = j1 - 1 - off - right, full_end = j0 - off + left + 1;
      if (full_begin <= queries_live.begin) full_begin = 0;
      if (full_end >= queries_live.end) full_end = kMaxLength;
    }
    return tiles(queries(a).begin, queries(b).end, full_begin, full_end, size);
  }

 private:
  static JAX_FLASH2_HD constexpr Tiles tiles(int begin, int end, int full_begin, int full_end, int size) {
    if (begin >= end) return {0, 0, 0, 0};
    const int first = begin / size, last = (end + size - 1) / size;
    int full_first = clamp_((full_begin + size - 1) / size, first, last);
    int full_last = clamp_(full_end / size, first, last);
    if (full_first >= full_last) full_first = full_last = first;
    return {first, full_first, full_last, last};
  }
};

}  // namespace jax_flash2
