// The columns that a lane holds of a row of C fragments: they are 0 1 8 9 16 17 .. further on than its first. Which of them
// are meant is said by bits: bit x stands for the x-th. Knows no fragment.
#pragma once
#include <cstdint>

#include "core/mask.h"

namespace jax_flash2::cuda::tile {

// Those in a range. `columns`: less the lane's first column. Bits of the lane's columns from the `first`-th on, which is even.
__device__ __forceinline__ uint32_t column_bits(Range columns, int first = 0) {
  const auto count_below = [](int column) { return column <= 0 ? 0 : column / 8 * 2 + min_(column % 8, 2); };
  const auto low_bits = [](int count) { return count >= 32 ? ~0u : (1u << max_(count, 0)) - 1; };
  return low_bits(count_below(columns.end) - first) & ~low_bits(count_below(columns.begin) - first);
}

// How much further on than the first one the x-th is.
__device__ __forceinline__ constexpr int column_step(int x) { return x / 2 * 8 + x % 2; }

}  // namespace jax_flash2::cuda::tile
