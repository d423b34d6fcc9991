// Tile sizes of the sm_90 backward: data, and what follows from it.
//
// What bounds the tiles: a warpgroup keeps dK and dV of its 64 keys in registers, head_dim of a thread's 232, and S and
// dP take `queries` more; shared memory holds K, V, two buffers of Q, dO and dS each, and a tile of dQ in float32.
#pragma once
#include <cstdint>

#include "cuda/sm90/config.cuh"

namespace jax_flash2::cuda::sm90 {

struct BackwardTile {
  int head_dim;
  int queries;  // of a step

  static constexpr int kConsumers = 2;  // warpgroups that compute, 64 keys each
  static constexpr int kStages = 2;     // buffers of Q, dO, dS
  constexpr int keys() const { return 64 * kConsumers; }
  constexpr int threads() const { return 128 * (kConsumers + 1); }
  // Registers of a thread: the kernel starts with 168 for each, then the first warpgroup hands on most of its own.
  constexpr int producer_registers() const { return 40; }
  constexpr int consumer_registers() const { return 232; }

  // Who works out what of dQ: with 128 queries each warpgroup has 64 of them, else each has some columns.
  constexpr bool dq_by_rows() const { return queries == 128; }
  constexpr int dq_cols(int group) const {
    if (dq_by_rows()) return head_dim;
    const int first = (head_dim + 127) / 128 * 64;  // whole panels of 64 columns
    return group == 0 ? first : head_dim - first;
  }
  constexpr int dq_first_col(int group) const { return dq_by_rows() || group == 0 ? 0 : dq_cols(0); }
};

template <int kHeadDim>
struct BackwardConfig;
template <>
struct BackwardConfig<64> {
  static constexpr BackwardTile kTile{.head_dim = 64, .queries = 128};
};
template <>
struct BackwardConfig<96> {
  static constexpr BackwardTile kTile{.head_dim = 96, .queries = 64};
};
template <>
struct BackwardConfig<128> {
  static constexpr BackwardTile kTile{.head_dim = 128, .queries = 64};
};

}  // namespace jax_flash2::cuda::sm90
