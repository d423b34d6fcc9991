// 16 x 16 blocks between shared tiles and registers, in the layouts of mma.m16n8k16. Knows lanes, not loops.
//
// With g = lane / 4 and q = lane % 4 a lane holds, packed in pairs of columns (A, C) or rows (B):
//   A[16 x 16]      a[0] (g, 2q) a[1] (g + 8, 2q) a[2] (g, 2q + 8) a[3] (g + 8, 2q + 8)
//   B[16 x 8]       b0 (2q, g)   b1 (2q + 8, g)
//   C[16 x 8]       c[0] c[1] (g, 2q + {0, 1})   c[2] c[3] (g + 8, 2q + {0, 1})
// So the C fragments of columns 16k .. 16k + 7 and 16k + 8 .. 16k + 15, converted, are the A fragment of columns 16k ..
#pragma once
#include <cstdint>

#include "cuda/ptx/math.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/tile/shared_tile.cuh"

namespace jax_flash2::cuda::tile {

// A lane's place in a tile for blocks that lie in it as the operand names them: A from [m][k], or, by a transposing
// load, B (two of them: columns 0 .. 7 in r[0] r[1], 8 .. 15 in r[2] r[3]) from [k][n]. And for blocks that lie in it
// the other way round: B from [n][k], or, by a transposing load, A from [k][m].
enum class Lies { kStraight, kAcross };

template <class Tile, Lies kLies>
struct BlockView {
  uint32_t lane;  // shared address

  // `row` is a multiple of 8 rows (16 where the panels are 32 columns wide).
  __device__ __forceinline__ explicit BlockView(uint32_t tile, int row = 0) {
    const int l = threadIdx.x % 32;
    lane = tile + row * Tile::kRowBytes +
           (kLies == Lies::kStraight ? Tile::offset(l & 15, l >> 4) : Tile::offset((l & 7) + (l >> 4) * 8, l >> 3 & 1));
  }

  // The same place in a tile that lies `bytes` further on.
  __device__ __forceinline__ BlockView at(uint32_t bytes) const {
    BlockView r = *this;
    r.lane += bytes;
    return r;
  }

  // The 16 x 16 block whose first element is (16 row_block, 16 col_block).
  __device__ __forceinline__ void load(uint32_t (&r)[4], int row_block, int col_block) const {
    ptx::ldmatrix_x4(r, Tile::advance(lane, row_block, col_block));
  }
  __device__ __forceinline__ void load_trans(uint32_t (&r)[4], int row_block, int col_block) const {
    ptx::ldmatrix_x4_trans(r, Tile::advance(lane, row_block, col_block));
  }
};

// A lane's place in a tile for storing C fragments.
template <class Tile>
struct StoreView {
  uint32_t lane;  // shared address

  // `row` is a multiple of 8 rows (16 where the panels are 32 columns wide).
  __device__ __forceinline__ explicit StoreView(uint32_t tile, int row = 0) {
    const int l = threadIdx.x % 32;
    lane = tile + row * Tile::kRowBytes + Tile::offset(l / 4, 0) + l % 4 * 4;
  }

  // Elements (g, 2q + {0, 1}) and (g + 8, 2q + {0, 1}) of the 16 x 8 block at (16 row_block, 8 col8).
  __device__ __forceinline__ void store(uint32_t upper, uint32_t lower, int row_block, int col8) const {
    const uint32_t at = (lane ^ (col8 % Tile::kPanelChunks * 16)) + col8 / Tile::kPanelChunks * Tile::kPanelBytes +
                        row_block * 16 * Tile::kRowBytes;
    ptx::st_shared_b32(at, upper);
    ptx::st_shared_b32(at + 8 * Tile::kRowBytes, lower);
  }
};

// The A fragment made of two neighbouring C fragments.
template <class Element>
__device__ __forceinline__ void convert_c_to_a(uint32_t (&a)[4], const float (&left)[4], const float (&right)[4]) {
  a[0] = ptx::cvt_x2<Element>(left[0], left[1]), a[1] = ptx::cvt_x2<Element>(left[2], left[3]);
  a[2] = ptx::cvt_x2<Element>(right[0], right[1]), a[3] = ptx::cvt_x2<Element>(right[2], right[3]);
}

}  // namespace jax_flash2::cuda::tile
