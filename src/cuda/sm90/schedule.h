// Which tile of queries a ticket of the forward stands for, and who has which where nobody asks. Tickets are handed out in
// order, so the longest tiles come first. Integers only; knows no kernel.
//
// Only `section` query heads are walked together, so that their K and V stay in L2; the query heads of a key head are
// neighbours.
#pragma once
#include <cstdint>

#include "core/spec.h"

namespace jax_flash2::cuda::sm90 {

struct Schedule {
  uint32_t tiles, heads, section;  // query tiles of a head; heads and batch rows together; a multiple of the group
  uint32_t workers;                // blocks; ticket i < workers is block i's first
  bool even;                       // all tiles cost the same

  struct Place {
    int tile, head;
  };

  JAX_FLASH2_HD uint32_t tickets() const { return tiles * heads; }

  // A block's ticket number `turn` where there is no queue. Even tiles are shifted by one each time: a block would meet the
  // same tile of every head else. Of others, the block that had the longest has the shortest of the next turn.
  JAX_FLASH2_HD uint32_t turn_of(uint32_t block, uint32_t turn) const {
    if (!even) return turn % 2 ? (turn + 1) * workers - 1 - block : turn * workers + block;
    return turn * workers + (block + turn) % workers;
  }

  JAX_FLASH2_HD Place place(uint32_t ticket) const {
    const uint32_t first = ticket / (tiles * section) * section, rest = ticket - first * tiles;
    const uint32_t together = first + section <= heads ? section : heads - first;
    return {int(tiles - 1 - rest / together), int(first + rest % together)};
  }
};

}  // namespace jax_flash2::cuda::sm90
