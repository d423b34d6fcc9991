// Which block walks which tiles, in which order, where blocks have no counter to draw tickets from, and what else they
// do. Integers only.
//
// Blocks that stay resident and walk a list hide each tile's start behind the end of the one before, but a list fixed
// beforehand must be fair. Where all tiles cost the same (no causal mask) a list of every workers-th tile is. Where
// they do not, a list is made of pairs: a head's tile with the most keys and the one with the fewest, the next two, and
// so on, which cost the same. The last tiles are blocks of their own, longest first, which the hardware hands out as
// multiprocessors fall idle. Heads are walked one after another.
#pragma once
#include <algorithm>
#include <cstdint>

#include "core/spec.h"

namespace jax_flash2::cuda::sm90 {

struct FixedLists {
  uint32_t tiles, heads;  // tiles of a head; heads and batch rows together
  uint32_t members;       // 2: pairs, 1: single tiles
  uint32_t workers;       // blocks that walk a list
  uint32_t listed;        // units (pairs, or tiles) in lists; the rest are blocks of their own

  struct Place {
    int tile, head;  // tile -1: nothing to do
    bool ends_unit;
  };

  // resident: blocks that the device runs at once; together: there are to be no more.
  static FixedLists make(uint32_t tiles, uint32_t heads, bool even, uint32_t resident, bool together) {
    FixedLists s{tiles, heads, even ? 1u : 2u, 0, 0};
    s.workers = std::min(resident, s.units()), s.listed = s.units();
    if (!even && !together) {
      const uint64_t all = uint64_t(tiles) * heads;  // one round of tiles, at least, is left over
      s.listed = all < resident ? 0 : uint32_t((all - resident) / resident / 2) * resident;
      if (s.listed == 0) s.workers = 0;
    }
    return s;
  }

  JAX_FLASH2_HD uint32_t units_of_head() const { return members == 2 ? (tiles + 1) / 2 : tiles; }
  JAX_FLASH2_HD uint32_t units() const { return units_of_head() * heads; }
  JAX_FLASH2_HD uint32_t blocks() const { return workers + (units() - listed) * members; }

  // Of a block that walks a list.
  JAX_FLASH2_HD int units_of_block(uint32_t block) const { return int((listed - block + workers - 1) / workers); }
  JAX_FLASH2_HD int steps(uint32_t block) const { return block < workers ? units_of_block(block) * int(members) : 1; }

  JAX_FLASH2_HD Place place(uint32_t block, uint32_t step) const {
    if (block < workers) return member(block + step / members * workers, step % members);
    const uint32_t rest = units() - listed, single = block - workers;  // the long ones of all pairs come first
    return single < rest ? member(listed + single, 0) : member(units() - 1 - (single - rest), 1);
  }

 private:
  JAX_FLASH2_HD Place member(uint32_t unit, uint32_t which) const {
    const uint32_t head = unit / units_of_head(), from_end = unit % units_of_head();
    const bool alone = members == 1 || from_end == tiles - 1 - from_end;  // the middle one is its own partner
    if (which == 1 && alone) return {-1, 0, false};
    return {int(which == 0 ? tiles - 1 - from_end : from_end), int(head), which == 1 || alone};
  }
};

// The chores of a call in the order in which warps draw them: the x-th of them prepares unit x, and converts unit
// x - ahead: where there are such units. A unit is a tile or a pair, as above.
//
// Nobody waits in vain where `ahead` is a head or more: to prepare waits for nobody; to convert waits for a head's tiles,
// and those for its units to be prepared, all of which were drawn before.
struct ChoreQueue {
  uint32_t units, ahead;

  // resident: blocks that draw. Ahead by rounds, for the long tiles of a head end late.
  JAX_FLASH2_HD static ChoreQueue make(uint32_t units, uint32_t units_of_head, uint32_t resident) {
    return {units, 4 * (units_of_head > resident ? units_of_head : resident)};
  }
  JAX_FLASH2_HD uint32_t size() const { return units + ahead; }
};

}  // namespace jax_flash2::cuda::sm90
