// Tile sizes of the sm_80 forward: data, and what follows from it. What was tried beside them: docs/performance.md.
#pragma once
#include <cstdint>

#include "cuda/tile/shared_tile.cuh"

namespace jax_flash2::cuda::sm80 {

struct ForwardTile {
  int head_dim;
  int rows;  // queries of a block; each warp owns rows / (16 warps) row blocks of 16, evenly spread over the tile
  int keys;  // keys of a step
  int warps;
  int stages;         // buffers of K and of V
  int blocks_per_sm;  // bounds the registers
  bool q_in_registers;

  constexpr int threads() const { return warps * 32; }
  constexpr int row_blocks() const { return rows / (16 * warps); }  // of a warp
  constexpr int tiles_bytes() const { return (rows + 2 * stages * keys) * head_dim * 2; }
  static constexpr int kOperandsBytes = 256;  // of the general body, behind the tiles
  constexpr int shared_bytes() const { return tiles_bytes() + kOperandsBytes; }
};

// Shared memory that a block may have where there is least: compute capability 8.6, 8.9, 12.x. 8.0 has 163 KB.
inline constexpr int kSharedBytesSmall = 99 * 1024;

// 32 rows a warp up to head dim 128, so that each fragment of K and V read from shared memory is used twice: at 16 rows
// shared memory is the bound. Above that the output would not fit in registers.
template <int kHeadDim>
struct ForwardConfig;
template <>
struct ForwardConfig<64> {
  static constexpr ForwardTile kTile{
      .head_dim = 64, .rows = 128, .keys = 64, .warps = 4, .stages = 2, .blocks_per_sm = 2, .q_in_registers = true};
};
template <>
struct ForwardConfig<96> {
  static constexpr ForwardTile kTile{
      .head_dim = 96, .rows = 128, .keys = 64, .warps = 4, .stages = 1, .blocks_per_sm = 2, .q_in_registers = false};
};
template <>
struct ForwardConfig<128> {
  static constexpr ForwardTile kTile{
      .head_dim = 128, .rows = 128, .keys = 64, .warps = 4, .stages = 1, .blocks_per_sm = 2, .q_in_registers = false};
};
template <>
struct ForwardConfig<192> {
  static constexpr ForwardTile kTile{
      .head_dim = 192, .rows = 128, .keys = 64, .warps = 8, .stages = 1, .blocks_per_sm = 1, .q_in_registers = false};
};
template <>
struct ForwardConfig<256> {
  static constexpr ForwardTile kTile{
      .head_dim = 256, .rows = 128, .keys = 64, .warps = 8, .stages = 1, .blocks_per_sm = 1, .q_in_registers = false};
};

// Of the head dims whose tile does not fit into kSharedBytesSmall.
template <int kHeadDim>
struct ForwardConfigSmall;
template <>
struct ForwardConfigSmall<256> {
  static constexpr ForwardTile kTile{
      .head_dim = 256, .rows = 64, .keys = 64, .warps = 4, .stages = 1, .blocks_per_sm = 1, .q_in_registers = false};
};

}  // namespace jax_flash2::cuda::sm80
