// Tile sizes of the sm_90 forward: data, and what follows from it. Why each: docs/performance.md.
#pragma once
#include <cstdint>

namespace jax_flash2::cuda::sm90 {

struct ForwardTile {
  int head_dim;    // of Q and K
  int value_dim;   // of V and out
  int consumers;   // warpgroups that compute, 64 queries each
  int keys;        // keys of a step
  int stages;      // buffers of K and of V
  int q_buffers;   // of each consumer
  bool ping_pong;  // the consumers' products take turns, so that one's softmax runs under the other's products
  float rate = 1;  // of its products, as a share of what the other tile for these heads reaches on long sequences

  constexpr int rows() const { return 64 * consumers; }
  constexpr int threads() const { return 128 * (consumers + 1); }
  // Registers of a thread: the kernel starts with what threads() leave each, then the producers hand most of theirs on.
  constexpr int producer_registers() const { return consumers <= 2 ? 40 : consumers == 3 ? 56 : 32; }
  constexpr int consumer_registers() const { return consumers <= 2 ? 232 : consumers == 3 ? 152 : 112; }
};

// Shared memory that a block may have.
inline constexpr int kSharedBytes = 227 * 1024;

template <int kHeadDim, int kValueDim>
struct ForwardConfig;
template <>
struct ForwardConfig<64, 64> {
  static constexpr ForwardTile kTile{
      .head_dim = 64, .value_dim = 64, .consumers = 4, .keys = 64, .stages = 4, .q_buffers = 2, .ping_pong = false};
};
template <>
struct ForwardConfig<96, 96> {
  static constexpr ForwardTile kTile{
      .head_dim = 96, .value_dim = 96, .consumers = 3, .keys = 64, .stages = 5, .q_buffers = 2, .ping_pong = false};
};
template <>
struct ForwardConfig<128, 128> {
  static constexpr ForwardTile kTile{
      .head_dim = 128, .value_dim = 128, .consumers = 3, .keys = 64, .stages = 4, .q_buffers = 2, .ping_pong = false};
};
template <>
struct ForwardConfig<192, 128> {
  static constexpr ForwardTile kTile{
      .head_dim = 192, .value_dim = 128, .consumers = 3, .keys = 64, .stages = 3, .q_buffers = 1, .ping_pong = false};
};
template <>
struct ForwardConfig<192, 192> {
  static constexpr ForwardTile kTile{
      .head_dim = 192, .value_dim = 192, .consumers = 2, .keys = 64, .stages = 3, .q_buffers = 1, .ping_pong = false};
};
template <>
struct ForwardConfig<256, 256> {
  static constexpr ForwardTile kTile{
      .head_dim = 256, .value_dim = 256, .consumers = 2, .keys = 64, .stages = 2, .q_buffers = 1, .ping_pong = false};
};

// For what acts on scores: few consumers, which have the more registers each.
template <int kHeadDim, int kValueDim>
struct RoomyConfig {
  static constexpr ForwardTile kTile = [] {
    ForwardTile tile = ForwardConfig<kHeadDim, kValueDim>::kTile;
    tile.consumers = kHeadDim == 64 ? 3 : 2;
    return tile;
  }();
};

// Fewer rows, for calls that would finish sooner with smaller pieces of work. The same as above where there is none.
template <int kHeadDim, int kValueDim>
struct FewerRowsConfig : ForwardConfig<kHeadDim, kValueDim> {};
template <>
struct FewerRowsConfig<128, 128> {
  static constexpr ForwardTile kTile{.head_dim = 128,
                                     .value_dim = 128,
                                     .consumers = 2,
                                     .keys = 128,
                                     .stages = 3,
                                     .q_buffers = 1,
                                     .ping_pong = true,
                                     .rate = 0.94f};
};
template <>
struct FewerRowsConfig<192, 128> {
  static constexpr ForwardTile kTile{.head_dim = 192,
                                     .value_dim = 128,
                                     .consumers = 2,
                                     .keys = 128,
                                     .stages = 2,
                                     .q_buffers = 1,
                                     .ping_pong = true,
                                     .rate = 0.95f};
};

}  // namespace jax_flash2::cuda::sm90
