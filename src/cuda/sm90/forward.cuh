// The forward pass on wgmma and TMA (compute capability 9.0), FlashAttention-3's way: blocks walk lists of query tiles; of
// a block one thread feeds buffers of Q, K and V, and two to four warpgroups of 64 queries each consume them. A step
// issues the scores of one key tile, then the output's share of the tile before, whose powers are at hand, and works
// out the softmax of the first while the second runs. Asks Mask and Score, and never knows which feature it serves.
#pragma once
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "core/problem.h"
#include "cuda/launch_kernel.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/stmatrix.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/forward_plan.cuh"
#include "cuda/sm90/softmax.cuh"
#include "cuda/tile/operand.cuh"

namespace jax_flash2::cuda::sm90 {

template <class Config, class Element>
__device__ __forceinline__ void produce(const Problem& p, const ForwardTensors& tensors, const Schedule& schedule,
                                        uint32_t shared) {
  constexpr ForwardTile kTile = Config::kTile;
  using Shared = ForwardShared<Config>;
  using QTile = typename Shared::QTile;
  using KTile = typename Shared::KTile;
  Ring<kTile.q_buffers> q_ring{shared + Shared::kQRing};
  Ring<kTile.stages> k_ring{shared + Shared::kKRing}, v_ring{shared + Shared::kVRing};
  ptx::prefetch_tensormap(&tensors.q.map), ptx::prefetch_tensormap(&tensors.k.map);
  ptx::prefetch_tensormap(&tensors.v.map), ptx::prefetch_tensormap(&tensors.out.map);

  const auto load = [&]<class Tile>(auto& ring, int buffers, const CUtensorMap& map, int row, int head, int batch,
                                    uint64_t hint) {
    ring.wait_empty();
    ptx::mbarrier_arrive_expect_tx(ring.full(), Tile::kBytes);
#pragma unroll
    for (int panel = 0; panel < Tile::kPanels; panel++) {
      ptx::cp_async_bulk_tensor_4d_load(shared + buffers + ring.stage * Tile::kBytes + panel * Tile::kPanelBytes, &map,
                                        panel * Tile::kPanelCols, row, head, batch, ring.full(), hint);
    }
    ring.next();
  };

  const int steps = schedule.steps(blockIdx.x);
  for (Step step; next_step<Config>(step, steps, shared, [] {});) {
    const Schedule::Place place = schedule.place(blockIdx.x, step.index);
    if (place.tile < 0) continue;
    const int n = place.head % p.N, row0 = place.tile * kTile.rows();
    const Batch b = p.batch(place.head / p.N);
    const Tiles tiles = p.mask(b).key_tiles(row0, min_(row0 + kTile.rows(), p.T), kTile.keys);
    if (tiles.begin >= tiles.end) continue;

    const int k_batch = tensors.k.batch(b), v_batch = tensors.v.batch(b), kv_head = n / p.group();
    const auto load_k = [&](int kv_tile) {
      load.template operator()<KTile>(k_ring, Shared::kK, tensors.k.map, kv_tile * kTile.keys, kv_head, k_batch,
                                      ptx::kEvictLast);
    };
    const auto load_v = [&](int kv_tile) {
      load.template operator()<KTile>(v_ring, Shared::kV, tensors.v.map, kv_tile * kTile.keys, kv_head, v_batch,
                                      ptx::kEvictLast);
    };
    const auto load_q = [&] {
      load.template operator()<QTile>(q_ring, Shared::kQ, tensors.q.map, row0, n, tensors.q.batch(b), ptx::kEvictFirst);
    };
    if constexpr (kTile.q_buffers > 1) load_q();
    load_k(tiles.end - 1);  // before a Q whose buffer the tile before still needs
    if constexpr (kTile.q_buffers == 1) load_q();
#pragma unroll 1
    for (int kv_tile = tiles.end - 1; kv_tile > tiles.begin; kv_tile--) load_k(kv_tile - 1), load_v(kv_tile);
    load_v(tiles.begin);
  }
}

template <class Config, class Element, bool kPlain>
__device__ __forceinline__ void consume(const Problem& p, const ForwardTensors& tensors, const Schedule& schedule,
                                        uint32_t shared, int group) {
  constexpr ForwardTile kTile = Config::kTile;
  constexpr int kKeys = kTile.keys, kHeadDim = kTile.head_dim, kConsumers = kTile.consumers;
  constexpr int kCols8 = kKeys / 8, kOut8 = kHeadDim / 8;
  constexpr bool kPingPong = kTile.ping_pong;
  constexpr Reference kReference = kTile.reference;
  constexpr int kTurnBarrier = 1, kGroupBarrier = kTurnBarrier + kConsumers;  // named, one a warpgroup each
  using Shared = ForwardShared<Config>;
  using QTile = typename Shared::QTile;
  using KTile = typename Shared::KTile;
  using ptx::Major;
  Ring<kTile.q_buffers> q_ring{shared + Shared::kQRing};
  Ring<kTile.stages> k_ring{shared + Shared::kKRing}, v_ring{shared + Shared::kVRing};
  const tile::Operand<QTile, Major::kK> q_operand(shared + Shared::kQ, group * 64);
  const tile::Operand<KTile, Major::kK> k_operand(shared + Shared::kK);
  const tile::Operand<KTile, Major::kMN> v_operand(shared + Shared::kV);

  const int thread = threadIdx.x % 128, lane = thread % 32;
  const int lane_row = group * 64 + thread / 32 * 16 + lane / 4;  // of a tile; its other row is 8 further on
  const auto one_a_warp = [&](auto&& action) {
    if (lane == 0) action();
  };
  const auto my_turn = [&] {
    if constexpr (kPingPong) ptx::bar_sync(kTurnBarrier + group, 256);
  };
  const auto next_turn = [&] {
    if constexpr (kPingPong) ptx::bar_arrive(kTurnBarrier + (group + 1) % kConsumers, 256);
  };
  static_assert(!kPingPong || kConsumers == 2);
  if (kPingPong && group == kConsumers - 1) next_turn();

  float out[kOut8][4], s[kCols8][4];
  uint32_t powers[kCols8 / 2][4];  // of the tile before, as fragments of A
  RowSoftmax softmax;

  const auto list_done = [&] {
    if (thread == 0) ptx::cp_async_bulk_wait_group<0>();  // what is done again is stored after what was done first
    __syncwarp();
    one_a_warp([&] { ptx::mbarrier_arrive(shared + Shared::kListDone); });
  };

  const int steps = schedule.steps(blockIdx.x);
  for (Step step; next_step<Config>(step, steps, shared, list_done);) {
    const Schedule::Place place = schedule.place(blockIdx.x, step.index);
    if (place.tile < 0) continue;
    const int n = place.head % p.N, row0 = place.tile * kTile.rows(), row = row0 + lane_row;
    const Batch b = p.batch(place.head / p.N);
    const Mask mask = p.mask(b);
    const Range live_k = mask.live_keys();
    const Tiles tiles = mask.key_tiles(row0, min_(row0 + kTile.rows(), p.T), kKeys);
    float* const lse_g = p.lse.at<float>(b, n);

    if (tiles.begin >= tiles.end) {
      Element* const out_g = p.out.at<Element>(b, n);
      for (int x = thread; x < 64 * kOut8; x += 128) {
        const int i = row0 + group * 64 + x / kOut8, column = x % kOut8 * 8;
        if (i < p.T && column < p.D) *reinterpret_cast<uint4*>(out_g + i * p.out.row + column) = uint4{};
        if (i < p.T && column == 0) lse_g[i * p.lse.row] = -INFINITY;
      }
      continue;
    }
    // In an unmasked tile every live row must have seen a key; rows that share a full tile are intervals that hold it, so
    // they all have if the first live one has.
    const int first_live = max_(row0, mask.live_queries().begin);
    int full_begin = tiles.full_begin, full_end = tiles.full_end;
    if (full_end < tiles.end && mask.keys(first_live).end <= full_end * kKeys)
      full_end = max_(full_begin, full_end - 1);
    if (step.again) full_begin = full_end = tiles.begin;

    const Score<float> score = p.score<float>(b, n);
    const Keep keep = p.keep(b, n);
    const auto is_live = [&](int h) {
      const Range keys = mask.keys(row + 8 * h);
      return keys.begin < keys.end;
    };
    softmax.start(kPlain ? score.scale * kLog2e : kLog2e, !is_live(0), !is_live(1));
#pragma unroll
    for (int x = 0; x < kOut8 * 4; x++) out[x / 4][x % 4] = 0;

    const auto issue_scores = [&] {
#pragma unroll
      for (int k = 0; k < kHeadDim / 16; k++) {
        ptx::Wgmma<Element, kKeys>::template ss<Major::kK>(s, q_operand.step(k, q_ring.stage * QTile::kBytes),
                                                           k_operand.step(k, k_ring.stage * KTile::kBytes), k > 0);
      }
      ptx::wgmma_commit_group();
    };
    const auto issue_output = [&] {
#pragma unroll
      for (int k = 0; k < kKeys / 16; k++) {
        ptx::Wgmma<Element, kHeadDim>::template rs<Major::kMN>(out, powers[k],
                                                               v_operand.step(k, v_ring.stage * KTile::kBytes), 1);
      }
      ptx::wgmma_commit_group();
    };
    const auto rescale = [&](const float (&factor)[2]) {
      ptx::wgmma_wait_group<0>();
      ptx::pin(out);
#pragma unroll
      for (int x = 0; x < kOut8 * 4; x++) out[x / 4][x % 4] *= factor[x / 2 % 2];
      ptx::pin(out);
    };
    // The scores of a tile, as the tensor core left them, to their powers.
    const auto weigh = [&]<bool kMasked>(int kv_tile) {
      const int column0 = kv_tile * kKeys + lane % 4 * 2;  // column 8j + e of this lane's is column0 + 8j + e
      if constexpr (!kPlain) {
#pragma unroll
        for (int x = 0; x < kCols8 * 4; x++) {
          s[x / 4][x % 4] = score.apply<Math>(s[x / 4][x % 4], row + x / 2 % 2 * 8, column0 + x / 4 * 8 + x % 2);
        }
      }
      if constexpr (kMasked) {
        // How many of this lane's columns, 0 1 8 9 16 17 .., lie below a column.
        const auto columns_below = [](int c) { return c <= 0 ? 0 : c / 8 * 2 + min_(c % 8, 2); };
        const auto low_bits = [](int count) { return count >= 32 ? ~0u : (1u << max_(count, 0)) - 1; };
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const Range keys = mask.keys(row + 8 * h);
          const int begin = columns_below(keys.begin - column0), end = columns_below(keys.end - column0);
#pragma unroll
          for (int word = 0; word < kCols8 * 2; word += 32) {
            const uint32_t kept = low_bits(end - word) & ~low_bits(begin - word);
#pragma unroll
            for (int x = word; x < kCols8 * 2 && x < word + 32; x++) {
              float& y = s[x / 2][2 * h + x % 2];
              y = kept & 1u << (x - word) ? y : -INFINITY;
            }
          }
        }
      }
      if constexpr (kMasked || kReference == Reference::kLargest) {
        softmax.largest(s, rescale);
      } else if constexpr (kReference == Reference::kStale) {
        softmax.stale(s, rescale);
      } else {
        softmax.first(s, rescale);
      }
      if constexpr (!kPlain) {
#pragma unroll
        for (int x = 0; x < kCols8 * 4; x++) {
          s[x / 4][x % 4] *= keep.factor(row + x / 2 % 2 * 8, column0 + x / 4 * 8 + x % 2);
        }
      }
    };
    const auto convert = [&] {
#pragma unroll
      for (int x = 0; x < kCols8 * 2; x++) {
        powers[x / 4][x % 4] = ptx::cvt_x2<Element>(s[x / 2][x % 2 * 2], s[x / 2][x % 2 * 2 + 1]);
      }
    };
    // V of a tile that holds dead keys: a zero times a NaN is no zero. Each warpgroup clears what it is about to read.
    bool unclean = false;
    const auto note_unclean = [&](int kv_tile) {
      unclean = kv_tile * kKeys < live_k.begin || kv_tile * kKeys + kKeys > min_(live_k.end, p.S);
      unclean &= kv_tile * kKeys < live_k.begin || live_k.end < p.S;  // past the tensor there are zeros already
    };
    const auto clean = [&](int kv_tile) {
      v_ring.wait_full();
      for (int x = thread; x < kKeys * kOut8; x += 128) {
        if (!live_k.has(kv_tile * kKeys + x / kOut8)) {
          ptx::st_shared_v4(shared + Shared::kV + v_ring.stage * KTile::kBytes + KTile::offset(x / kOut8, x % kOut8),
                            {});
        }
      }
      ptx::fence_proxy_async();  // the tensor core is to see the zeros, and later copies are to come after them
      ptx::bar_sync(kGroupBarrier + group, 128);
    };

    int kv_tile = tiles.end - 1;
    q_ring.wait_full();
    k_ring.wait_full();
    ptx::pin(s);
    ptx::wgmma_fence();
    issue_scores();
    ptx::wgmma_wait_group<0>();
    ptx::pin(s);
    one_a_warp([&] { k_ring.release(); });
    k_ring.next();
    weigh.template operator()<true>(kv_tile);
    convert();
    note_unclean(kv_tile);

    const auto step_to = [&]<bool kMasked>(int kv_tile) {
      k_ring.wait_full();
      if (unclean) clean(kv_tile + 1);
      my_turn();
      ptx::pin(s), ptx::pin(out), ptx::pin(powers);
      ptx::wgmma_fence();
      issue_scores();
      v_ring.wait_full();
      ptx::wgmma_fence();
      issue_output();
      next_turn();
      ptx::wgmma_wait_group<1>();
      ptx::pin(s);
      one_a_warp([&] { k_ring.release(); });
      k_ring.next();
      weigh.template operator()<kMasked>(kv_tile);
      ptx::wgmma_wait_group<0>();
      ptx::pin(out), ptx::pin(powers);
      one_a_warp([&] { v_ring.release(); });
      v_ring.next();
      convert();
      if constexpr (kMasked) {
        note_unclean(kv_tile);
      } else {
        unclean = false;
      }
    };
    // Three loops, of which two are alike: with one masked loop for both ends ptxas serialises the products (C7511).
#pragma unroll 1
    while (kv_tile > full_end) step_to.template operator()<true>(--kv_tile);
#pragma unroll 1
    while (kv_tile > full_begin) step_to.template operator()<false>(--kv_tile);
#pragma unroll 1
    while (kv_tile > tiles.begin) step_to.template operator()<true>(--kv_tile);

    if constexpr (kTile.own_out) one_a_warp([&] { q_ring.release(); });
    if (unclean) clean(kv_tile);
    v_ring.wait_full();
    ptx::pin(out), ptx::pin(powers);
    ptx::wgmma_fence();
    issue_output();
    RowSoftmax::Row ends[2];
#pragma unroll
    for (int h = 0; h < 2; h++) ends[h] = softmax.finish(h, is_live(h));
    ptx::wgmma_wait_group<0>();
    ptx::pin(out), ptx::pin(powers);
    one_a_warp([&] { v_ring.release(); });
    v_ring.next();

    if constexpr (kReference == Reference::kFirst) {
      if (!step.again && __any_sync(~0u, softmax.lost(is_live(0), is_live(1)))) {
        one_a_warp(
            [&] { ptx::red_shared_or_b32(shared + Shared::kAgain + step.index / 32 * 4, 1u << step.index % 32); });
      }
    }

    // Out through shared memory; the tensor map keeps rows and columns past the tensor from being written.
    constexpr int kOutPanelRows = kTile.rows();
    static_assert(QTile::kPanelBytes == kOutPanelRows * QTile::kRowBytes);
    const uint32_t out_s = shared + Shared::kOut + group * 64 * QTile::kRowBytes;
    if constexpr (kTile.own_out) {
      if (thread == 0) ptx::cp_async_bulk_wait_group_read<0>();
      ptx::bar_sync(kGroupBarrier + group, 128);  // the store of the tile before has left the buffer
    }
    const uint32_t lane_s = out_s + QTile::offset(thread / 32 * 16 + lane % 16, lane / 16);
#pragma unroll
    for (int c = 0; c < kHeadDim / 16; c++) {
      const auto rows_of = [&](int j, int h) {  // not 0 times a NaN that other rows may read
        const float* x = &out[j][2 * h];
        const float inverse = ends[h].inverse;
        return inverse == 0 ? 0 : ptx::cvt_x2<Element>(x[0] * inverse, x[1] * inverse);
      };
      ptx::stmatrix_x4(QTile::advance(lane_s, 0, c), rows_of(2 * c, 0), rows_of(2 * c, 1), rows_of(2 * c + 1, 0),
                       rows_of(2 * c + 1, 1));
    }
    ptx::fence_proxy_async();                   // what was written, to the copy engine
    ptx::bar_sync(kGroupBarrier + group, 128);  // of all warps
    if (thread == 0) {
#pragma unroll
      for (int panel = 0; panel < QTile::kPanels; panel++) {
        ptx::cp_async_bulk_tensor_4d_store(&tensors.out.map, panel * QTile::kPanelCols, row0 + group * 64, n,
                                           tensors.out.batch(b), out_s + panel * QTile::kPanelBytes);
      }
      ptx::cp_async_bulk_commit_group();
      if constexpr (!kTile.own_out) {
        ptx::cp_async_bulk_wait_group_read<0>();
        q_ring.release();
      }
    }
    q_ring.next();
#pragma unroll
    for (int h = 0; h < 2; h++) {
      if (lane % 4 == 0 && row + 8 * h < p.T) lse_g[(row + 8 * h) * p.lse.row] = ends[h].lse;
    }
  }
  if (thread == 0) ptx::cp_async_bulk_wait_group<0>();  // shared memory is read until then
}

template <class Config, class Element, bool kPlain>
__global__ void __launch_bounds__(Config::kTile.threads(), 1)
    forward_kernel(const __grid_constant__ Problem p, const __grid_constant__ ForwardTensors tensors,
                   const __grid_constant__ Schedule schedule) {
  constexpr ForwardTile kTile = Config::kTile;
  using Shared = ForwardShared<Config>;
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  const uint32_t shared = ptx::shared_address(shared_memory);
  if (threadIdx.x == 0) {
    constexpr int kWarps = kTile.consumers * 4;
    Ring<kTile.q_buffers>{shared + Shared::kQRing}.init(kTile.own_out ? kWarps : kTile.consumers);
    Ring<kTile.stages>{shared + Shared::kKRing}.init(kWarps);
    Ring<kTile.stages>{shared + Shared::kVRing}.init(kWarps);
    ptx::mbarrier_init(shared + Shared::kListDone, kWarps);
    ptx::fence_mbarrier_init();
  }
  if constexpr (kTile.reference == Reference::kFirst) {
    for (int x = threadIdx.x; x < kMostSteps / 32; x += kTile.threads()) {
      ptx::st_shared_b32(shared + Shared::kAgain + x * 4, 0);
    }
  }
  __syncthreads();  // barriers and marks are there

  const int warp = __shfl_sync(~0u, int(threadIdx.x / 32), 0);
  if (warp < 4) {
    ptx::setmaxnreg_dec<kTile.producer_registers()>();
    if (warp == 0 && ptx::elect_sync()) produce<Config, Element>(p, tensors, schedule, shared);
  } else {
    ptx::setmaxnreg_inc<kTile.consumer_registers()>();
    consume<Config, Element, kPlain>(p, tensors, schedule, shared, warp / 4 - 1);
  }
}

// Enqueues one body; the other need not exist.
template <class Config, class Element, bool kPlain>
Status launch_forward(const Problem& p, const Schedule& schedule, cudaStream_t stream) {
  using QTile = typename ForwardShared<Config>::QTile;
  using KTile = typename ForwardShared<Config>::KTile;
  ForwardTensors tensors;
  const TensorMapEncoder encoder = find_tensor_map_encoder();
  const bool keys = p.S > 0;  // without keys K and V have no memory to point at, and nobody looks
  const TensorMapShape q_shape{p.T, p.N, p.D, QTile::kPanelCols, QTile::kRows};
  const TensorMapShape kv_shape{keys ? p.S : p.T, keys ? p.K : p.N, p.D, KTile::kPanelCols, KTile::kRows};
  const TensorMapShape out_shape{p.T, p.N, p.D, QTile::kPanelCols, 64};
  for (const Status status : {encode_tensor_map(encoder, p, p.q, q_shape, &tensors.q),
                              encode_tensor_map(encoder, p, keys ? p.k : p.q, kv_shape, &tensors.k),
                              encode_tensor_map(encoder, p, keys ? p.v : p.q, kv_shape, &tensors.v),
                              encode_tensor_map(encoder, p, p.out, out_shape, &tensors.out)}) {
    if (!status.ok()) return status;
  }
  return launch_kernel(forward_kernel<Config, Element, kPlain>, schedule.blocks(), Config::kTile.threads(),
                       ForwardShared<Config>::kBytes, stream, p, tensors, schedule);
}

template <class Config, class Element>
Status forward_with(const Problem& p, cudaStream_t stream) {
  if (p.B == 0 || p.T == 0 || p.N == 0) return {};
  Schedule schedule;
  if (const Status status = forward_schedule<Config>(p, &schedule); !status.ok()) return status;
  return p.plain() ? launch_forward<Config, Element, true>(p, schedule, stream)
                   : launch_forward<Config, Element, false>(p, schedule, stream);
}

// The entry point that generated units instantiate: heads of up to kHeadDim columns.
template <class Element, int kHeadDim>
Status forward(const Problem& p, cudaStream_t stream) {
  return forward_with<ForwardConfig<kHeadDim>, Element>(p, stream);
}

}  // namespace jax_flash2::cuda::sm90
