// What the host decides of an sm_80 backward: how many blocks, which does what, and how many buffers they have. Knows no
// thread.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "core/problem.h"
#include "cuda/launch_kernel.cuh"
#include "cuda/sm80/config_backward.cuh"

namespace jax_flash2::cuda::sm80 {

// Which block does what. The query heads of a key head are one block's, or are split over `parts` blocks.
struct BackwardOrder {
  uint32_t tiles, parts, heads;  // key tiles; parts of a group; key heads and batch rows together
  bool ordered;                  // blocks add to dQ in turn
  bool descending;               // ... the last keys first

  struct Place {
    int tile, part, head;
  };
  // Key tiles next to each other, for they share Q, dO and dQ. Where blocks wait for each other the heads come first, so that
  // neighbours in a queue start one after another; a block waits only for blocks with smaller tickets.
  JAX_FLASH2_HD Place place(uint32_t ticket) const {
    if (ordered) {
      const uint32_t tile = ticket / heads;
      return {int(descending ? tiles - 1 - tile : tile), 0, int(ticket % heads)};
    }
    const uint32_t rest = ticket / tiles;
    return {int(ticket % tiles), int(rest % parts), int(rest / parts)};
  }
};

// What a plan needs to know of the current device; zeros where it cannot be read, and a launch fails.
struct Device {
  int sms = device_attribute(cudaDevAttrMultiProcessorCount);
  int shared_of_block = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  int shared_of_sm = device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);

  // Blocks of an SM that shared memory allows; each costs 1 KB more than it asks for.
  int blocks(int shared_bytes) const {
    return shared_bytes > shared_of_block ? 0 : shared_of_sm / (shared_bytes + 1024);
  }
};

// Whether groups are split, for which dk and dv go through accumulators, and how many buffers of Q and dO blocks have.
template <class Config>
struct BackwardPlan {
  static constexpr BackwardTile kTile = Config::kTile;
  BackwardOrder order;
  int stages;
  int64_t blocks;

  BackwardPlan(const Problem& p, const Device& device) {
    // A second buffer of Q and dO hides their loads, a second block hides more.
    const int one = min_(device.blocks(kTile.shared_bytes(1)), kTile.blocks_per_sm);
    const int two = min_(device.blocks(kTile.shared_bytes(2)), kTile.blocks_per_sm);
    stages = two >= one ? 2 : 1;
    const int64_t tiles = (p.S + kTile.keys - 1) / kTile.keys, heads = int64_t(p.B) * p.K;
    blocks = tiles * heads;
    const int64_t slots = int64_t(device.sms) * max_(one, 1);
    int64_t parts = 1;
    const bool summed = p.T > 0 && p.dk_acc.present() && p.dv_acc.present();  // without queries nobody has cleared them
    if (summed && !p.spec.deterministic && 0 < blocks && blocks < slots) {
      parts = (slots + blocks - 1) / blocks;
      if (parts > p.group()) parts = p.group();
      const int heads_of_part = (p.group() + parts - 1) / parts;
      parts = (p.group() + heads_of_part - 1) / heads_of_part;  // no part without a head
    }
    // Under a causal mask, which spans may be, the last keys are first at any query.
    const bool descending = p.spec.window_right >= 0 || p.has_spans();
    const bool ordered = p.spec.deterministic && p.T > 0;  // without queries nobody adds, or has cleared the tickets
    order = {uint32_t(tiles), uint32_t(parts), uint32_t(heads), ordered, descending};
    blocks *= parts;
  }
};

}  // namespace jax_flash2::cuda::sm80
