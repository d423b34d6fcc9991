// The forward pass on mma.sync (compute capability 8.0 and newer), FlashAttention-2's way: a block owns a tile of
// queries of one head and walks the key tiles that its mask leaves, from the last to the first; warps split the rows;
// scores, probabilities and the unscaled output stay in registers. Asks Mask, Score and Operands, and never knows
// which feature it serves.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "core/problem.h"
#include "cuda/launch_kernel.cuh"
#include "cuda/operands.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/sm80/config.cuh"
#include "cuda/softmax.cuh"
#include "cuda/tile/columns.cuh"
#include "cuda/tile/copy.cuh"
#include "cuda/tile/fragment.cuh"
#include "cuda/tile/shared_tile.cuh"

namespace jax_flash2::cuda::sm80 {

// Which block does what. Blocks start in the order of their index: the last query tiles, which see most keys under a
// causal mask, come first, but only `section` query heads are walked together, so that their K and V stay in L2; the
// query heads of a key head are neighbours.
struct ForwardOrder {
  uint32_t tiles, heads, section;  // query tiles of a head; heads and batch rows together; a multiple of the group

  struct Place {
    int tile, head;
  };
  JAX_FLASH2_HD Place place(uint32_t block) const {
    const uint32_t first = block / (tiles * section) * section, rest = block - first * tiles;
    const uint32_t together = first + section <= heads ? section : heads - first;
    return {int(tiles - 1 - rest / together), int(first + rest % together)};
  }
};

// kBody: kPlain, or kGeneral for all others.
template <class Config, class Element, Body kBody>
__global__ void __launch_bounds__(Config::kTile.threads(), Config::kTile.blocks_per_sm)
    forward_kernel(const __grid_constant__ Problem p, const ForwardOrder order) {
  constexpr bool kPlain = kBody == Body::kPlain;
  constexpr int kRows = Config::kTile.rows, kKeys = Config::kTile.keys, kHeadDim = Config::kTile.head_dim;
  constexpr int kWarps = Config::kTile.warps, kThreads = Config::kTile.threads(), kStages = Config::kTile.stages;
  constexpr bool kQInRegisters = Config::kTile.q_in_registers;
  constexpr int kRowBlocks = Config::kTile.row_blocks(), kCols8 = kKeys / 8, kOut8 = kHeadDim / 8;
  constexpr int kDepth = kHeadDim / 16;
  using QTile = tile::SharedTile<kRows, kHeadDim>;
  using KTile = tile::SharedTile<kKeys, kHeadDim>;
  using CopyQ = tile::Copy<QTile, kThreads>;
  using CopyK = tile::Copy<KTile, kThreads>;

  const ForwardOrder::Place place = order.place(blockIdx.x);
  const int n = place.head % p.N;
  const Batch b = p.batch(place.head / p.N);
  extern __shared__ __align__(1024) uint8_t shared[];
  static_assert(sizeof(Operands) <= ForwardTile::kOperandsBytes);
  Operands* const operands_s = reinterpret_cast<Operands*>(shared + Config::kTile.tiles_bytes());
  if constexpr (!kPlain) {
    if (threadIdx.x == 0) operands_s->mask = p.mask(b), operands_s->template set_head<kBody>(p, b, n);
    __syncthreads();  // the operands are there
  }
  const Mask bounds = p.mask<false>(b);  // of the plain body the mask; the general one's stays in shared memory
  const auto mask = [&] { return kPlain ? bounds : operands_s->mask; };
  const int row0 = place.tile * kRows;
  const Tiles tiles = mask().key_tiles(row0, min_(row0 + kRows, p.T), kKeys);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // Row block i of this warp; the blocks of a warp are spread, so that a diagonal that leaves one half of the tile
  // without keys takes work from every warp alike.
  const auto block_row = [&](int i) { return (i * kWarps + warp) * 16; };
  Element* const out_g = p.out.at<Element>(b, n);
  float* const lse_g = p.lse.at<float>(b, n);
  const float head_sink = p.sink<float>(b, n);
  const auto sink = [&](int row) { return row < bounds.q_len ? head_sink : -INFINITY; };

  if (tiles.begin >= tiles.end) {
    constexpr int kChunks = kHeadDim / 8;
    for (int x = threadIdx.x; x < kRows * kChunks; x += kThreads) {
      const int i = row0 + x / kChunks, column = x % kChunks * 8;
      if (i < p.T && column < p.Dv) *reinterpret_cast<uint4*>(out_g + i * p.out.row + column) = uint4{};
      if (i < p.T && column == 0) lse_g[i * p.lse.row] = sink(i);
    }
    return;
  }

  const uint32_t q_s = ptx::shared_address(shared), k_s = q_s + QTile::kBytes, v_s = k_s + kStages * KTile::kBytes;
  const auto stage = [&](int kv_tile) { return kStages == 1 ? 0 : (kv_tile & 1) * KTile::kBytes; };

  const Element* const k_g = p.k.at<const Element>(b, n / p.group());
  const Element* const v_g = p.v.at<const Element>(b, n / p.group());
  const CopyK copy_kv;
  const auto load_k = [&](int kv_tile) {
    copy_kv.load(k_s + stage(kv_tile), k_g, p.k.row, p.D, kv_tile * kKeys, mask().live_keys());
    ptx::cp_async_commit_group();
  };
  const auto load_v = [&](int kv_tile) {
    copy_kv.load(v_s + stage(kv_tile), v_g, p.v.row, p.Dv, kv_tile * kKeys, mask().live_keys());
    ptx::cp_async_commit_group();
  };

  CopyQ().load(q_s, p.q.at<const Element>(b, n), p.q.row, p.D, row0, mask().live_queries());
  load_k(tiles.end - 1);
  if (kStages > 1) load_v(tiles.end - 1);

  const tile::BlockView<QTile, tile::Lies::kStraight> q_view(q_s, warp * 16);
  const tile::BlockView<KTile, tile::Lies::kAcross> k_view(k_s);
  const tile::BlockView<KTile, tile::Lies::kStraight> v_view(v_s);
  uint32_t q_r[kQInRegisters ? kRowBlocks : 1][kQInRegisters ? kDepth : 1][4];
  if constexpr (kQInRegisters) {
    ptx::cp_async_wait_group<0>();
    __syncthreads();  // Q, copied by all threads, is there
#pragma unroll
    for (int i = 0; i < kRowBlocks; i++) {
#pragma unroll
      for (int d = 0; d < kDepth; d++) q_view.load(q_r[i][d], i * kWarps, d);
    }
  }

  const Score<float> score = p.score<float>(b, n);
  const bool drops = !kPlain && operands_s->dropout.present();
  Softmax<kRowBlocks> softmax(kPlain ? score.scale * kLog2e : kLog2e);
  float out[kRowBlocks][kOut8][4] = {};

  // One key tile. kFirst: row blocks below it see none of its keys.
  const auto step = [&]<bool kMasked, int kFirst>(int kv_tile) {
    ptx::cp_async_wait_group<0>();
    __syncthreads();  // K (and with two stages V) of this tile is there, and every warp has left the tile before
    if constexpr (kStages == 1) {
      load_v(kv_tile);
    } else if (kv_tile > tiles.begin) {
      load_k(kv_tile - 1);
      load_v(kv_tile - 1);
    }

    float s[kRowBlocks][kCols8][4] = {};
#pragma unroll
    for (int d = 0; d < kDepth; d++) {
      uint32_t q[kRowBlocks][4];
#pragma unroll
      for (int i = kFirst; i < kRowBlocks; i++) {
        if constexpr (kQInRegisters) {
#pragma unroll
          for (int x = 0; x < 4; x++) q[i][x] = q_r[i][d][x];
        } else {
          q_view.load(q[i], i * kWarps, d);
        }
      }
#pragma unroll
      for (int j = 0; j < kCols8 / 2; j++) {
        uint32_t k[4];
        k_view.at(stage(kv_tile)).load(k, j, d);
#pragma unroll
        for (int i = kFirst; i < kRowBlocks; i++) {
          ptx::mma_m16n8k16<Element>(s[i][2 * j], q[i], k[0], k[1]);
          ptx::mma_m16n8k16<Element>(s[i][2 * j + 1], q[i], k[2], k[3]);
        }
      }
    }

    const int column0 = kv_tile * kKeys + lane % 4 * 2;  // column 8j + e of this lane's is column0 + 8j + e
    if constexpr (!kPlain) {
#pragma unroll
      for (int i = kFirst; i < kRowBlocks; i++) {
        apply(score, s[i]);
        constexpr int kPairs = kCols8 * 2;
        const Lines<true, kPairs> lines{row0 + block_row(i) + lane / 4, column0};
        const auto at = [&](int h, int x) -> float& { return s[i][x / 2][2 * h + x % 2]; };
        const Acts acts = operands_s->acts;
        uint32_t left[2];
        if (acts.ask()) {
          float bias[2][kPairs];
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const Range keys = mask().keys(lines.query(h, 0));
            left[h] = tile::column_bits({keys.begin - column0, keys.end - column0});
          }
          operands_s->call_ask(lines, left, bias);
#pragma unroll
          for (int x = 0; x < 2 * kPairs; x++) {
            float& y = at(x / kPairs, x % kPairs);
            y = left[x / kPairs] >> x % kPairs & 1 ? y + bias[x / kPairs][x % kPairs] : -INFINITY;
          }
        }
        if (acts.add()) operands_s->template add<false, kPairs>(operands_s->hold(lines.i, p.T), lines, left, at);
      }
    }
    if constexpr (kMasked) {
      const Mask seen = mask();
#pragma unroll
      for (int i = kFirst; i < kRowBlocks; i++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const Range keys = seen.keys(row0 + block_row(i) + lane / 4 + h * 8);
          const int begin = keys.begin - column0, end = keys.end - column0;
          if (__any_sync(~0u, end < kKeys)) {
#pragma unroll
            for (int x = 0; x < kCols8 * 2; x++)
              if (x / 2 * 8 + x % 2 >= end) s[i][x / 2][2 * h + x % 2] = -INFINITY;
          }
          if (__any_sync(~0u, begin > 0)) {
#pragma unroll
            for (int x = 0; x < kCols8 * 2; x++)
              if (x / 2 * 8 + x % 2 < begin) s[i][x / 2][2 * h + x % 2] = -INFINITY;
          }
        }
      }
    }
    softmax.template meet<kFirst>(s, out);

    if constexpr (kStages == 1) {
      ptx::cp_async_wait_group<0>();
      __syncthreads();  // V of this tile is there, and every warp has left its K
      if (kv_tile > tiles.begin) load_k(kv_tile - 1);
    }
#pragma unroll
    for (int c = 0; c < kCols8 / 2; c++) {
      uint32_t probability[kRowBlocks][4];
#pragma unroll
      for (int i = kFirst; i < kRowBlocks; i++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
          s[i][2 * c][e] = softmax.power(s[i][2 * c][e], i, e / 2);
          s[i][2 * c + 1][e] = softmax.power(s[i][2 * c + 1][e], i, e / 2);
        }
        if (drops) {
          const Dropout<float> dropout = operands_s->dropout;
          drop(dropout, row0 + block_row(i) + lane / 4, column0 + 16 * c, s[i][2 * c], s[i][2 * c + 1]);
        }
        tile::convert_c_to_a<Element>(probability[i], s[i][2 * c], s[i][2 * c + 1]);
      }
#pragma unroll
      for (int j = 0; j < kOut8 / 2; j++) {
        uint32_t v[4];
        v_view.at(stage(kv_tile)).load_trans(v, c, j);
#pragma unroll
        for (int i = kFirst; i < kRowBlocks; i++) {
          ptx::mma_m16n8k16<Element>(out[i][2 * j], probability[i], v[0], v[1]);
          ptx::mma_m16n8k16<Element>(out[i][2 * j + 1], probability[i], v[2], v[3]);
        }
      }
    }
  };

  // Where the key tiles end that the first half of the rows sees: a causal diagonal leaves it without the last ones.
  const int first_half_end =
      kRowBlocks == 2 ? max_(tiles.begin, mask().key_tiles(row0, min_(row0 + kRows / 2, p.T), kKeys).end) : tiles.end;
  int kv_tile = tiles.end;
  if constexpr (kRowBlocks == 2) {
    while (kv_tile > max_(first_half_end, tiles.full_end)) step.template operator()<true, 1>(--kv_tile);
  }
  for (int masked_until = tiles.full_end;; masked_until = tiles.begin) {
    while (kv_tile > masked_until) step.template operator()<true, 0>(--kv_tile);
    if (kv_tile == tiles.begin) break;
    while (kv_tile > tiles.full_begin) step.template operator()<false, 0>(--kv_tile);
  }

  // Out through shared memory, for 16-byte stores of whole lines. A warp's rows of Q were read by that warp alone.
  const tile::StoreView<QTile> out_view(q_s, warp * 16);
#pragma unroll
  for (int i = 0; i < kRowBlocks; i++) {
    float inverse[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int row = row0 + block_row(i) + lane / 4 + h * 8;
      RowEnd end = softmax.template finish<!kPlain>(i, h);
      if (!mask().live_queries().has(row))
        end = {0, -INFINITY};  // a tile that is full for its live rows gave this one keys too
      end = with_sink(end, sink(row));
      inverse[h] = end.inverse * (drops ? operands_s->dropout.scale : 1.0f);
      if (lane % 4 == 0 && row < p.T) lse_g[row * p.lse.row] = end.lse;
    }
#pragma unroll
    for (int j = 0; j < kOut8; j++) {
      const auto row_of = [&](int h) {  // not 0 times a NaN that other rows may read
        const float* x = &out[i][j][2 * h];
        return inverse[h] == 0 ? 0 : ptx::cvt_x2<Element>(x[0] * inverse[h], x[1] * inverse[h]);
      };
      out_view.store(row_of(0), row_of(1), i * kWarps, j);
    }
  }
  __syncthreads();  // rows are stored by other warps than wrote them
  CopyQ().store(out_g, p.out.row, p.Dv, row0, p.T, q_s);
}

template <class Config, class Element>
Status launch_forward(const Problem& p, cudaStream_t stream) {
  constexpr ForwardTile kTile = Config::kTile;
  if (p.B == 0 || p.T == 0) return {};
  const int64_t tiles = (int64_t(p.T) + kTile.rows - 1) / kTile.rows, heads = int64_t(p.B) * p.N;
  // Half of L2 for K and V, the rest for what streams by.
  const int64_t key_head_bytes = int64_t(p.S) * (p.D + p.Dv) * int64_t(sizeof(Element)) + 1;
  const int64_t key_heads = device_attribute(cudaDevAttrL2CacheSize) / 2 / key_head_bytes;
  const int64_t section = std::clamp<int64_t>(key_heads, 1, int64_t(p.B) * p.K) * p.group();
  const ForwardOrder order{uint32_t(tiles), uint32_t(heads), uint32_t(section)};
  return launch_kernel(p.body() == Body::kPlain ? forward_kernel<Config, Element, Body::kPlain>
                                                : forward_kernel<Config, Element, Body::kGeneral>,
                       tiles * heads, kTile.threads(), kTile.shared_bytes(), stream, p, order);
}

// The entry point that generated units instantiate: heads of up to kHeadDim columns, and as many of values.
template <class Element, int kHeadDim, int kValueDim = kHeadDim>
Status forward(const Problem& p, cudaStream_t stream) {
  static_assert(kValueDim == kHeadDim);
  constexpr ForwardTile kTile = ForwardConfig<kHeadDim>::kTile;
  if constexpr (kTile.shared_bytes() > kSharedBytesSmall) {
    if (device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) < kTile.shared_bytes()) {
      return launch_forward<ForwardConfigSmall<kHeadDim>, Element>(p, stream);
    }
  }
  return launch_forward<ForwardConfig<kHeadDim>, Element>(p, stream);
}

}  // namespace jax_flash2::cuda::sm80
