// Tile sizes of the sm_80 backward: data, and what follows from it.
//
// What bounds the tiles: dK and dV of a block live in registers, 2 x keys x head_dim floats, half of the register file of
// an SM over all its blocks; S and dP take a quarter. Shared memory traffic is the bound after that: a warp's product
// of a x b reads (a + b) k, so warp tiles are kept near 32 x 32 and 32 x 64.
#pragma once
#include <cstdint>

#include "cuda/tile/shared_tile.cuh"

namespace jax_flash2::cuda::sm80 {

struct BackwardTile {
  int head_dim;
  int queries;        // of a step
  int keys;           // of a block
  int warps_keys;     // the warps stand in a grid: so many over the keys,
  int warps_across;   // times so many over the queries (S, dP) and, in turn, over the columns (dK, dV)
  int warps_dq_rows;  // of all warps over the rows of dQ; the rest over its columns
  int sub_queries;    // queries whose S and dP a warp holds at a time
  int blocks_per_sm;  // bounds the registers

  constexpr int warps() const { return warps_keys * warps_across; }
  constexpr int threads() const { return warps() * 32; }
  constexpr int warp_keys() const { return keys / warps_keys; }
  constexpr int warp_queries() const { return queries / warps_across; }
  constexpr int warps_dq_cols() const { return warps() / warps_dq_rows; }

  constexpr int k_bytes() const { return keys * head_dim * 2; }     // K; V alike
  constexpr int q_bytes() const { return queries * head_dim * 2; }  // Q; dO alike
  constexpr int ds_bytes() const { return keys * queries * 2; }     // dS; P, where warps exchange it, alike
  constexpr int p_bytes() const { return warps_across > 1 ? ds_bytes() : 0; }
  static constexpr int kRestBytes = 1024;  // lse, delta, barriers, pointers, operands
  constexpr int shared_bytes(int stages) const {
    return 2 * k_bytes() + ds_bytes() + p_bytes() + kRestBytes + 2 * stages * q_bytes();
  }

  constexpr bool valid() const {
    const auto power_of_two = [](int x) { return x > 0 && (x & (x - 1)) == 0; };
    return warp_keys() % 16 == 0 && warp_queries() % sub_queries == 0 && sub_queries % 16 == 0 &&
           (queries == 32 || queries == 64) && power_of_two(warp_queries()) && power_of_two(warps_across) &&
           head_dim % (16 * warps_across) == 0 && power_of_two(warps_dq_rows) && queries % (16 * warps_dq_rows) == 0 &&
           power_of_two(warps_dq_cols()) && head_dim % (16 * warps_dq_cols()) == 0 && 2 * queries <= threads();
  }
};

// Shared memory of a block: compute capability 8.0 has 163 KB, 9.0 and 10.x 227 KB, the rest (8.6, 8.9, 12.x) 99 KB. One
// or two buffers of Q and dO are chosen by what fits; a tile of its own for 99 KB exists where one does not fit.
template <int kHeadDim>
struct BackwardConfig;
template <int kHeadDim>
struct BackwardConfigSmall;  // of the head dims that need one

template <>
struct BackwardConfig<64> {
  static constexpr BackwardTile kTile{.head_dim = 64,
                                      .queries = 64,
                                      .keys = 128,
                                      .warps_keys = 4,
                                      .warps_across = 1,
                                      .warps_dq_rows = 2,
                                      .sub_queries = 32,
                                      .blocks_per_sm = 2};
};
template <>
struct BackwardConfig<96> {
  static constexpr BackwardTile kTile{.head_dim = 96,
                                      .queries = 64,
                                      .keys = 64,
                                      .warps_keys = 2,
                                      .warps_across = 2,
                                      .warps_dq_rows = 2,
                                      .sub_queries = 32,
                                      .blocks_per_sm = 2};
};
template <>
struct BackwardConfig<128> {  // 128 keys a block: half the additions to dQ of 64
  static constexpr BackwardTile kTile{.head_dim = 128,
                                      .queries = 64,
                                      .keys = 128,
                                      .warps_keys = 4,
                                      .warps_across = 2,
                                      .warps_dq_rows = 2,
                                      .sub_queries = 32,
                                      .blocks_per_sm = 1};
};
template <>
struct BackwardConfig<192> {
  static constexpr BackwardTile kTile{.head_dim = 192,
                                      .queries = 64,
                                      .keys = 64,
                                      .warps_keys = 2,
                                      .warps_across = 4,
                                      .warps_dq_rows = 2,
                                      .sub_queries = 16,
                                      .blocks_per_sm = 1};
};
template <>
struct BackwardConfig<256> {
  static constexpr BackwardTile kTile{.head_dim = 256,
                                      .queries = 64,
                                      .keys = 64,
                                      .warps_keys = 2,
                                      .warps_across = 4,
                                      .warps_dq_rows = 2,
                                      .sub_queries = 16,
                                      .blocks_per_sm = 1};
};
template <>
struct BackwardConfigSmall<128> {
  static constexpr BackwardTile kTile{.head_dim = 128,
                                      .queries = 64,
                                      .keys = 64,
                                      .warps_keys = 2,
                                      .warps_across = 2,
                                      .warps_dq_rows = 2,
                                      .sub_queries = 32,
                                      .blocks_per_sm = 2};
};
template <>
struct BackwardConfigSmall<192> {
  static constexpr BackwardTile kTile{.head_dim = 192,
                                      .queries = 32,
                                      .keys = 64,
                                      .warps_keys = 4,
                                      .warps_across = 2,
                                      .warps_dq_rows = 2,
                                      .sub_queries = 16,
                                      .blocks_per_sm = 1};
};
template <>
struct BackwardConfigSmall<256> {
  static constexpr BackwardTile kTile{.head_dim = 256,
                                      .queries = 32,
                                      .keys = 32,
                                      .warps_keys = 2,
                                      .warps_across = 2,
                                      .warps_dq_rows = 2,
                                      .sub_queries = 16,
                                      .blocks_per_sm = 1};
};

}  // namespace jax_flash2::cuda::sm80
