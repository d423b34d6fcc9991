// Tile sizes of the sm_90 backward: data, and what follows from it.
//
// What bounds the tiles: dK and dV of a block live in the registers of its two computing warpgroups, 232 a thread, and
// S, dP and dQ need some too. A narrow tile gives each warpgroup 64 keys, whole rows of dK and dV; of more than 128
// columns that is too much, and a wide tile gives each half of the columns of the same 64 keys. Shared memory holds K,
// V, two buffers of Q, dS on its way to dQ, and dQ in float32 on its way out.
#pragma once
#include <cstdint>

#include "cuda/sm90/config.cuh"

namespace jax_flash2::cuda::sm90 {

struct BackwardTile {
  int head_dim;   // of Q and K
  int value_dim;  // of V, out and dO
  int queries;    // of a step
  bool wide = false;
  int dout_buffers = 2;
  int dq_rounds = 1;  // in which a warpgroup's part of dQ leaves

  static constexpr int kConsumers = 2;  // warpgroups that compute
  static constexpr int kStages = 2;     // buffers of Q
  constexpr int keys() const { return wide ? 64 : 128; }
  constexpr int threads() const { return 128 * (kConsumers + 1); }
  // Registers of a thread: the kernel starts with 168 for each, then the first warpgroup hands on most of its own.
  constexpr int producer_registers() const { return 40; }
  constexpr int consumer_registers() const { return 232; }

  // Queries of which a warpgroup works out P and dS.
  constexpr int own_queries() const { return wide ? queries / kConsumers : queries; }

  // Columns of dK, and of dV, that a warpgroup has; they are whole panels of shared memory.
  constexpr int key_cols() const { return wide ? head_dim / 2 : head_dim; }
  constexpr int value_cols() const { return wide ? value_dim / 2 : value_dim; }
  static constexpr int panel_cols(int cols) { return cols % 64 == 0 ? 64 : 32; }

  // Who works out what of dQ: with 128 queries each warpgroup has 64 of them, else some columns, the first perhaps all.
  constexpr bool dq_by_rows() const { return queries == 128; }
  constexpr int dq_cols(int group) const {
    if (dq_by_rows()) return head_dim;
    const int first = wide ? head_dim / 2 : (head_dim + 127) / 128 * 64;
    return group == 0 ? first : head_dim - first;
  }
  constexpr int dq_first_col(int group) const { return dq_by_rows() || group == 0 ? 0 : dq_cols(0); }
};

template <int kHeadDim, int kValueDim>
struct BackwardConfig;
template <>
struct BackwardConfig<64, 64> {
  static constexpr BackwardTile kTile{.head_dim = 64, .value_dim = 64, .queries = 128};
};
template <>
struct BackwardConfig<96, 96> {
  static constexpr BackwardTile kTile{.head_dim = 96, .value_dim = 96, .queries = 64};
};
template <>
struct BackwardConfig<128, 128> {
  static constexpr BackwardTile kTile{.head_dim = 128, .value_dim = 128, .queries = 64};
};
template <>
struct BackwardConfig<192, 128> {
  static constexpr BackwardTile kTile{.head_dim = 192, .value_dim = 128, .queries = 64, .wide = true};
};
template <>
struct BackwardConfig<192, 192> {
  static constexpr BackwardTile kTile{.head_dim = 192, .value_dim = 192, .queries = 64, .wide = true};
};
template <>
struct BackwardConfig<256, 256> {
  static constexpr BackwardTile kTile{
      .head_dim = 256, .value_dim = 256, .queries = 64, .wide = true, .dout_buffers = 1, .dq_rounds = 2};
};

// For what acts on scores: no more queries than leave registers to work it out.
template <int kHeadDim, int kValueDim>
struct RoomyBackwardConfig {
  static constexpr BackwardTile kTile = [] {
    BackwardTile tile = BackwardConfig<kHeadDim, kValueDim>::kTile;
    tile.queries = 64;
    return tile;
  }();
};

}  // namespace jax_flash2::cuda::sm90
