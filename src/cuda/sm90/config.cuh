// Tile sizes of the sm_90 kernels: data, and what follows from it. Why each: see the measurements beside them.
#pragma once
#include <cstdint>

namespace jax_flash2::cuda::sm90 {

// Which score a row of the forward subtracts before it takes powers, see sm90/softmax.cuh.
enum class Reference {
  kLargest,  // its largest so far, but for a slack
  kStale,    // the same, found by integer maxima of differences that are needed anyway
  kFirst,    // the largest of the first tile in which it sees a key; a tile of queries that outgrows it is done again
};

struct ForwardTile {
  int head_dim;
  int consumers;  // warpgroups that compute, 64 queries each
  int keys;       // keys of a step
  int stages;     // buffers of K and of V
  int q_buffers;
  bool own_out;    // out has its own buffer; else it takes the place of Q, and the next tile's Q waits for its store
  bool ping_pong;  // the consumers' products take turns, so that one's softmax runs under the other's products
  Reference reference;

  constexpr int rows() const { return 64 * consumers; }
  constexpr int threads() const { return 128 * (consumers + 1); }
  // Registers of a thread: the kernel starts with what threads() leave each, then the producer hands most of its own on.
  constexpr int producer_registers() const { return consumers <= 2 ? 24 : 32; }
  constexpr int consumer_registers() const { return consumers <= 2 ? 240 : consumers == 3 ? 160 : 112; }
  constexpr int q_bytes() const { return rows() * head_dim * 2; }
  constexpr int kv_bytes() const { return keys * head_dim * 2; }
  constexpr int buffers_bytes() const { return (q_buffers + (own_out ? 1 : 0)) * q_bytes() + 2 * stages * kv_bytes(); }
};

// Shared memory that a block may have.
inline constexpr int kSharedBytes = 227 * 1024;

// The best tile depends on the head dim and, for two of them, on the length: see docs/performance.md.
template <int kHeadDim>
struct ForwardConfig;
template <>
struct ForwardConfig<64> {
  static constexpr ForwardTile kTile{.head_dim = 64,
                                     .consumers = 4,
                                     .keys = 64,
                                     .stages = 2,
                                     .q_buffers = 2,
                                     .own_out = true,
                                     .ping_pong = false,
                                     .reference = Reference::kStale};
};
template <>
struct ForwardConfig<96> {
  static constexpr ForwardTile kTile{.head_dim = 96,
                                     .consumers = 3,
                                     .keys = 96,
                                     .stages = 2,
                                     .q_buffers = 1,
                                     .own_out = true,
                                     .ping_pong = false,
                                     .reference = Reference::kStale};
};
template <>
struct ForwardConfig<128> {
  static constexpr ForwardTile kTile{.head_dim = 128,
                                     .consumers = 2,
                                     .keys = 128,
                                     .stages = 2,
                                     .q_buffers = 1,
                                     .own_out = true,
                                     .ping_pong = true,
                                     .reference = Reference::kStale};
};
template <>
struct ForwardConfig<192> {
  static constexpr ForwardTile kTile{.head_dim = 192,
                                     .consumers = 2,
                                     .keys = 96,
                                     .stages = 2,
                                     .q_buffers = 1,
                                     .own_out = false,
                                     .ping_pong = false,
                                     .reference = Reference::kStale};
};
template <>
struct ForwardConfig<256> {
  static constexpr ForwardTile kTile{.head_dim = 256,
                                     .consumers = 2,
                                     .keys = 80,
                                     .stages = 2,
                                     .q_buffers = 1,
                                     .own_out = false,
                                     .ping_pong = false,
                                     .reference = Reference::kLargest};
};

}  // namespace jax_flash2::cuda::sm90
