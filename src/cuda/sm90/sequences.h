// What schedules think of packed sequences, of which only the device knows the contents: that all are as long as the
// longest may be. A wrong guess costs time and nothing else. Integers only; knows no kernel.
#pragma once
#include <algorithm>
#include <cstdint>

#include "core/problem.h"
#include "core/spec.h"

namespace jax_flash2::cuda::sm90 {

// In keys; of what is no pack, or one of which nobody knows, all.
inline int64_t longest_sequence(const Problem& p) {
  const bool known = p.has_spans() && p.spec.longest_span > 0;
  return known ? std::min<int64_t>(p.S, p.spec.longest_span) : p.S;
}

// The tiles of a pack's keys, of sequences that have as many each, or one fewer.
struct Sequences {
  uint32_t count, least, longer;  // sequences; tiles of each; how many have one more, which are the first

  static Sequences make(const Problem& p, int64_t tiles) {
    const int64_t longest = longest_sequence(p);
    return of(tiles, longest > 0 ? (p.S + longest / 2) / longest : 1);
  }
  static Sequences of(int64_t tiles, int64_t count) {
    count = std::clamp<int64_t>(count, 1, std::max<int64_t>(tiles, 1));
    return {uint32_t(count), uint32_t(tiles / count), uint32_t(tiles % count)};
  }

  // The x-th tile, where the first ones of all sequences come first, then the second ones, and so on: under a causal mask
  // that is by their work, so that blocks that draw them end together.
  JAX_FLASH2_HD uint32_t tile(uint32_t x) const {
    const uint32_t sequence = x % count;
    return sequence * least + (sequence < longer ? sequence : longer) + x / count;
  }
};

}  // namespace jax_flash2::cuda::sm90
