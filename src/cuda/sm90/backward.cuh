// The backward pass on wgmma and TMA (compute capability 9.0), FlashAttention-3's way: a block owns a tile of keys of one
// head and walks the query tiles that its mask leaves. Of its warps four feed (sm90/backward_feed.cuh), and two
// warpgroups of 64 keys each compute. Asks Mask, Score, Keep and DScore, and never knows which feature it serves.
//
// Scores are computed transposed (keys x queries), so that P and dS leave the tensor cores as the operands that dV = P dO
// and dK = dS Q want, in registers. Only dS, which dQ = dS^T K wants the other way round, goes through shared memory, and
// dQ, which leaves it as an addition to memory.
#pragma once
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "core/problem.h"
#include "cuda/convert.cuh"
#include "cuda/delta.cuh"
#include "cuda/launch_kernel.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/stmatrix.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/backward_feed.cuh"
#include "cuda/sm90/backward_plan.cuh"
#include "cuda/sm90/convert_queries.cuh"
#include "cuda/softmax.cuh"
#include "cuda/tile/accumulator.cuh"
#include "cuda/tile/fragment.cuh"
#include "cuda/tile/operand.cuh"

namespace jax_flash2::cuda::sm90 {

// The same number, of which the compiler knows nothing.
__device__ __forceinline__ uint32_t forget(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

__device__ __forceinline__ Mask forget(Mask m) {
  for (int* x : {&m.q_len, &m.k_len, &m.left, &m.right, &m.off}) *x = int(forget(uint32_t(*x)));
  return m;
}

template <class Config, class Element, bool kPlain>
__device__ __forceinline__ void compute(const Problem& p, const BackwardTensors& tensors,
                                        const BackwardSchedule& schedule, uint32_t block, uint32_t shared_, int group) {
  constexpr BackwardTile kTile = Config::kTile;
  constexpr int kKeys = kTile.keys(), kQueries = kTile.queries, kHeadDim = kTile.head_dim;
  constexpr int kCols8 = kQueries / 8, kOut8 = kHeadDim / 8;
  constexpr int kAllBarrier = 1, kGroupBarrier = 2;  // named; one of all who compute, one a warpgroup
  constexpr int kAll = 128 * kTile.kConsumers;
  using Shared = BackwardShared<Config>;
  using KTile = typename Shared::KTile;
  using QTile = typename Shared::QTile;
  using DsTile = typename Shared::DsTile;
  using OutTile = typename Shared::OutTile;
  using ptx::Major;

  const uint32_t thread_ = threadIdx.x % 128, thread = thread_, lane = thread % 32, shared = shared_;
  Ring<1> k_ring{shared + Shared::kKRing}, dq_ring{shared + Shared::kDqRing + group * Ring<1>::kBytes};
  Ring<Shared::kStages> q_ring{shared + Shared::kQRing};
  const auto dout_ring = [&] {  // goes round with the other
    return Ring<Shared::kStages>{q_ring.barriers + Shared::kDoutRing - Shared::kQRing, q_ring.stage, q_ring.parity};
  };
  const auto one_a_warp = [&](auto&& action) {
    if (lane == 0) action();
  };

  float dk[kOut8][4], dv[kOut8][4];
  bool leaving = false;  // dK and dV of the tile before are on their way out of the places of dQ and dS

  const int steps = schedule.steps(block);
#pragma unroll 1
  for (int list_step = 0; list_step < steps; list_step++) {
    KeyTile at{};
    if (!at.template find<kKeys, kQueries>(p, schedule, block, list_step)) continue;
    const int j0 = at.tile * kKeys;
    const Tiles tiles = at.tiles;
    if (tiles.begin >= tiles.end) {
      if (schedule.parts > 1) continue;  // the accumulators are clear
      Element* const dk_g = p.dk.at<Element>(at.b, at.k_head);
      Element* const dv_g = p.dv.at<Element>(at.b, at.k_head);
      for (int x = thread; x < 64 * kOut8; x += 128) {
        const int j = j0 + group * 64 + x / kOut8, column = x % kOut8 * 8;
        if (j < p.S && column < p.D) {
          *reinterpret_cast<uint4*>(dk_g + j * p.dk.row + column) = uint4{};
          *reinterpret_cast<uint4*>(dv_g + j * p.dv.row + column) = uint4{};
        }
      }
      continue;
    }
    const Range live_q = at.mask.live_queries(), live_k = at.mask.live_keys();
    const Score<float> score = p.score<float>(at.b, at.n_begin);
    const float scale_log2 = score.scale * kLog2e;
#pragma unroll
    for (int x = 0; x < kOut8 * 4; x++) dk[x / 4][x % 4] = dv[x / 4][x % 4] = 0;

    // Rows that nobody reads may hold NaN, and a zero times a NaN is no zero: they are cleared where they are summed over.
    // Each warpgroup clears what it is about to read.
    const auto clean = [&]<class Tile>(uint32_t tile, int row0, int rows, Range live) {
      if (row0 >= live.begin && min_(row0 + Tile::kRows, rows) <= live.end)
        return;  // past the tensor are zeros already
      for (int x = thread; x < Tile::kRows * kOut8; x += 128) {
        if (!live.has(row0 + x / kOut8)) ptx::st_shared_v4(tile + Tile::offset(x / kOut8, x % kOut8), {});
      }
      ptx::fence_proxy_async();  // the tensor core is to see the zeros, and later copies are to come after them
      ptx::bar_sync(kGroupBarrier + group, 128);
    };

    const auto step = [&]<bool kMasked>(int n, int m) {
      // What follows from these is worked out in each step: kept, it would take more registers than there are.
      const uint32_t shared = forget(shared_), thread = forget(thread_), lane = thread % 32, warp = thread / 32;
      const tile::Operand<KTile, Major::kK> k_operand(shared + Shared::kK, group * 64);
      const tile::Operand<KTile, Major::kK> v_operand(shared + Shared::kV, group * 64);
      const tile::Operand<QTile, Major::kK> q_operand(shared + Shared::kQ), dout_operand(shared + Shared::kDout);
      const tile::Operand<QTile, Major::kMN> q_cols_operand(shared + Shared::kQ);
      const tile::Operand<QTile, Major::kMN> dout_cols_operand(shared + Shared::kDout);
      const tile::Operand<DsTile, Major::kK> ds_operand(shared + Shared::kDs, kTile.dq_by_rows() ? group * 64 : 0);
      const tile::Operand<KTile, Major::kMN> k_cols_operand(
          shared + Shared::kK + kTile.dq_first_col(group) / KTile::kPanelCols * KTile::kPanelBytes);
      const uint32_t ds_s =
          shared + Shared::kDs + DsTile::offset((lane >> 4) * 8 + (lane & 7), group * 8 + warp * 2 + (lane >> 3 & 1));
      const int lane_key = group * 64 + warp * 16 + lane / 4;  // of the tile; this lane's other key is 8 further on
      // This warp's rows of dQ, in the order of tile/row_blocks.cuh.
      const int dq_row = kTile.dq_by_rows() ? group * 64 + warp * 16 : warp * 16;
      const uint32_t dq_s = shared + Shared::kDq + dq_row * p.D * 4;

      const int i0 = m * kQueries, j0 = forget(at.tile) * kKeys;
      const Mask mask = forget(at.mask);
      const Range live_q = mask.live_queries();
      const uint32_t q_stage = q_ring.stage * QTile::kBytes, ds_stage = q_ring.stage * DsTile::kBytes;
      const uint32_t statistics =
          shared + Shared::kStatistics + q_ring.stage * Shared::kStatisticsBytes + lane % 4 * 8;  // of column 2q
      float s[kCols8][4], dp[kCols8][4];

      q_ring.wait_full();
      if constexpr (kMasked) clean.template operator()<QTile>(shared + Shared::kQ + q_stage, i0, p.T, live_q);
      ptx::pin(s);
      ptx::wgmma_fence();
#pragma unroll
      for (int k = 0; k < kHeadDim / 16; k++) {
        ptx::Wgmma<Element, kQueries>::template ss<Major::kK>(s, k_operand.step(k), q_operand.step(k, q_stage), k > 0);
      }
      ptx::wgmma_commit_group();
      dout_ring().wait_full();
      if constexpr (kMasked) clean.template operator()<QTile>(shared + Shared::kDout + q_stage, i0, p.T, live_q);
      ptx::pin(dp);
      ptx::wgmma_fence();
#pragma unroll
      for (int k = 0; k < kHeadDim / 16; k++) {
        ptx::Wgmma<Element, kQueries>::template ss<Major::kK>(dp, v_operand.step(k), dout_operand.step(k, q_stage),
                                                              k > 0);
      }
      ptx::wgmma_commit_group();
      ptx::wgmma_wait_group<1>();
      ptx::pin(s);

      const Keep keep = p.keep(at.b, n);
      const DScore dscore = p.dscore(at.b, n);
      // Which of this lane's queries, 0 1 8 9 16 17 .. from column 2q on, see its keys: a bit each.
      uint32_t seen[2] = {~0u, ~0u};
      if constexpr (kMasked) {
        const auto columns_below = [](int c) { return c <= 0 ? 0 : c / 8 * 2 + min_(c % 8, 2); };
        const auto low_bits = [](int count) { return count >= 32 ? ~0u : (1u << count) - 1; };
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const Range queries = mask.queries(j0 + lane_key + 8 * h);
          const int column0 = i0 + lane % 4 * 2;
          seen[h] = low_bits(columns_below(queries.end - column0)) & ~low_bits(columns_below(queries.begin - column0));
        }
      }
      const auto is_seen = [&](int j, int e) { return !kMasked || (seen[e / 2] >> (2 * j + e % 2) & 1); };
      // P from scores; in the general body scores from products, for dS asks for them.
#pragma unroll
      for (int j = 0; j < kCols8; j++) {
        if constexpr (kPlain) {
          const float2 lse = ptx::ld_shared_v2_f32(statistics + j * 32);  // negative, log2
#pragma unroll
          for (int e = 0; e < 4; e++) {
            s[j][e] = ptx::ex2(fmaf(s[j][e], scale_log2, e % 2 ? lse.y : lse.x));
            if (!is_seen(j, e)) s[j][e] = 0;
          }
        } else {
#pragma unroll
          for (int e = 0; e < 4; e++) {
            const int row = i0 + lane % 4 * 2 + 8 * j + e % 2, key = j0 + lane_key + e / 2 * 8;
            s[j][e] = score.apply<Math>(s[j][e], row, key);
          }
        }
      }
      uint32_t p_r[kCols8 / 2][4], ds_r[kCols8 / 2][4];
      if constexpr (kPlain) {
#pragma unroll
        for (int c = 0; c < kCols8 / 2; c++) tile::convert_c_to_a<Element>(p_r[c], s[2 * c], s[2 * c + 1]);
      }
      ptx::wgmma_wait_group<0>();
      ptx::pin(dp);
#pragma unroll
      for (int j = 0; j < kCols8; j++) {
        const float2 delta = ptx::ld_shared_v2_f32(statistics + kQueries * 4 + j * 32);
        if constexpr (kPlain) {
#pragma unroll
          for (int e = 0; e < 4; e++) {
            dp[j][e] = s[j][e] * (dp[j][e] - (e % 2 ? delta.y : delta.x));
            if (!is_seen(j, e)) dp[j][e] = 0;
          }
        } else {
          const float2 lse = ptx::ld_shared_v2_f32(statistics + j * 32);
#pragma unroll
          for (int e = 0; e < 4; e++) {
            const int row = i0 + lane % 4 * 2 + 8 * j + e % 2, key = j0 + lane_key + e / 2 * 8;
            const float x = s[j][e], kept = keep.factor(row, key);
            const float probability = ptx::ex2(fmaf(x, kLog2e, e % 2 ? lse.y : lse.x));
            const float ds = probability * (dp[j][e] * kept - (e % 2 ? delta.y : delta.x));
            s[j][e] = is_seen(j, e) ? probability * kept : 0.0f;
            dp[j][e] = is_seen(j, e) ? ds * score.slope(x) : 0.0f;
            if (is_seen(j, e)) dscore(row, key, ds);
          }
        }
      }
#pragma unroll
      for (int c = 0; c < kCols8 / 2; c++) {
        if constexpr (!kPlain) tile::convert_c_to_a<Element>(p_r[c], s[2 * c], s[2 * c + 1]);
        tile::convert_c_to_a<Element>(ds_r[c], dp[2 * c], dp[2 * c + 1]);
      }

      ptx::pin(dv), ptx::pin(p_r);
      ptx::wgmma_fence();
#pragma unroll
      for (int c = 0; c < kQueries / 16; c++) {
        ptx::Wgmma<Element, kHeadDim>::template rs<Major::kMN>(dv, p_r[c], dout_cols_operand.step(c, q_stage), 1);
      }
      ptx::wgmma_commit_group();
      if (leaving) {
        if (thread == 0) ptx::cp_async_bulk_wait_group_read<0>();
        ptx::bar_sync(kAllBarrier, kAll);
        leaving = false;
      }
#pragma unroll
      for (int c = 0; c < kCols8 / 2; c++) {
        ptx::stmatrix_x4_trans(DsTile::advance(ds_s + ds_stage, c, 0), ds_r[c][0], ds_r[c][1], ds_r[c][2], ds_r[c][3]);
      }
      ptx::fence_proxy_async();
      ptx::bar_sync(kAllBarrier, kAll);  // dS of all keys is there

      const auto rest = [&]<int kDqCols>() {
        float dq[kDqCols / 8][4];
        ptx::pin(dq);
        ptx::wgmma_fence();
#pragma unroll
        for (int k = 0; k < kKeys / 16; k++) {
          ptx::Wgmma<Element, kDqCols>::template ss<Major::kMN>(dq, ds_operand.step(k, ds_stage),
                                                                k_cols_operand.step(k), k > 0);
        }
        ptx::wgmma_commit_group();
        ptx::wgmma_wait_group<1>();
        ptx::pin(dv), ptx::pin(p_r);
        one_a_warp([&] { dout_ring().release(); });
        ptx::pin(dk), ptx::pin(ds_r);
        ptx::wgmma_fence();
#pragma unroll
        for (int c = 0; c < kQueries / 16; c++) {
          ptx::Wgmma<Element, kHeadDim>::template rs<Major::kMN>(dk, ds_r[c], q_cols_operand.step(c, q_stage), 1);
        }
        ptx::wgmma_commit_group();
        ptx::wgmma_wait_group<1>();
        ptx::pin(dq);
        dq_ring.wait_empty();
        const int first_col = kTile.dq_first_col(group);
        if (i0 + dq_row + tile::RowBlocks::kRows <= p.T) {
          const uint32_t to = dq_s + first_col * tile::RowBlocks::kRows * 4 + lane * 16;
#pragma unroll
          for (int j = 0; j < kDqCols / 8; j++) {
            if (first_col + 8 * j < p.D) ptx::st_shared_v4_f32(to + j * 512, dq[j]);
          }
        } else {
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const int row = lane / 4 + 8 * h, col = first_col + lane % 4 * 2;
            if (i0 + dq_row + row >= p.T) continue;
            const uint32_t to = dq_s + (row * p.D + col) * 4;
#pragma unroll
            for (int j = 0; j < kDqCols / 8; j++) {
              if (first_col + 8 * j >= p.D) continue;
              ptx::st_shared_f32(to + j * 32, dq[j][2 * h]), ptx::st_shared_f32(to + j * 32 + 4, dq[j][2 * h + 1]);
            }
          }
        }
        ptx::fence_proxy_async();  // what was written, to the copy engine
        __syncwarp();
        one_a_warp([&] { ptx::mbarrier_arrive(dq_ring.full()); });
        dq_ring.next();
        ptx::wgmma_wait_group<0>();
        ptx::pin(dk), ptx::pin(ds_r);
        one_a_warp([&] { q_ring.release(); });
        q_ring.next();
      };
      if constexpr (Config::kTile.dq_cols(0) == Config::kTile.dq_cols(1)) {
        rest.template operator()<Config::kTile.dq_cols(0)>();
      } else if (group == 0) {
        rest.template operator()<Config::kTile.dq_cols(0)>();
      } else {
        rest.template operator()<Config::kTile.dq_cols(1)>();
      }
    };

    // A tile with dead queries is done as a masked one, which clears them.
    const int full_begin = clamp_((live_q.begin + kQueries - 1) / kQueries, tiles.full_begin, tiles.full_end);
    const int full_end = live_q.end == p.T ? tiles.full_end : clamp_(live_q.end / kQueries, full_begin, tiles.full_end);

    k_ring.wait_full();
    clean.template operator()<KTile>(shared + Shared::kK, j0, p.S, live_k);
#pragma unroll 1
    for (int n = at.n_begin; n < at.n_end; n++) {
      int m = tiles.begin;
      if constexpr (kPlain) {
#pragma unroll 1
        for (; m < full_begin; m++) step.template operator()<true>(n, m);
#pragma unroll 1
        for (; m < full_end; m++) step.template operator()<false>(n, m);
      }
#pragma unroll 1
      for (; m < tiles.end; m++) step.template operator()<true>(n, m);
    }
    one_a_warp([&] { k_ring.release(); });
    k_ring.next();

    at.template find<kKeys, kQueries>(p, schedule, block, forget(list_step));  // not kept through the loops
    const uint32_t warp = forget(thread_) / 32;
    const int key0 = at.tile * kKeys;
    if (schedule.parts > 1) {
      const int row0 = key0 + group * 64 + warp * 16;
      const auto add = [&](const float (&x)[kOut8][4], float* to) {
        tile::add_fragments<false, 1>(reinterpret_cast<const float (&)[1][kOut8][4]>(x), to, {p.S, p.D}, row0, 0);
      };
      add(dk, p.dk_acc.at<float>(at.b, at.k_head));
      add(dv, p.dv_acc.at<float>(at.b, at.k_head));
      continue;
    }
    // Out through the places of dQ and dS; the tensor maps keep rows and columns past the tensors from being written.
    for (int g = 0; g < kTile.kConsumers; g++) {  // all of dQ has left
      Ring<1>{shared + Shared::kDqRing + g * Ring<1>::kBytes, 0, dq_ring.parity}.wait_empty();
    }
    ptx::bar_sync(kAllBarrier, kAll);  // and nobody reads dS
    const int lane_key = key0 + group * 64 + warp * 16 + lane / 4;
    const Range live_keys = at.mask.live_keys();
    const bool live[2] = {live_keys.has(lane_key), live_keys.has(lane_key + 8)};  // else not even 0 times a NaN
    const auto stage = [&](const float (&x)[kOut8][4], uint32_t tile, float scale) {
      const uint32_t lane_s = tile + OutTile::offset(warp * 16 + lane % 16, lane / 16);
      const auto pair = [&](int j, int h) {
        return live[h] ? ptx::cvt_x2<Element>(x[j][2 * h] * scale, x[j][2 * h + 1] * scale) : 0u;
      };
#pragma unroll
      for (int c = 0; c < kHeadDim / 16; c++) {
        ptx::stmatrix_x4(OutTile::advance(lane_s, 0, c), pair(2 * c, 0), pair(2 * c, 1), pair(2 * c + 1, 0),
                         pair(2 * c + 1, 1));
      }
    };
    const uint32_t dv_s = shared + Shared::kDs + group * OutTile::kBytes;
    const uint32_t dk_s = shared + Shared::kDq + group * OutTile::kBytes;
    stage(dv, dv_s, 1.0f);
    stage(dk, dk_s, p.score<float>(at.b, at.n_begin).scale);
    ptx::fence_proxy_async();
    ptx::bar_sync(kGroupBarrier + group, 128);
    if (thread == 0) {
      const int row = key0 + group * 64;
#pragma unroll
      for (int panel = 0; panel < OutTile::kPanels; panel++) {
        const int col = panel * OutTile::kPanelCols, offset = panel * OutTile::kPanelBytes;
        ptx::cp_async_bulk_tensor_4d_store(&tensors.dv.map, col, row, at.k_head, tensors.dv.batch(at.b), dv_s + offset);
        ptx::cp_async_bulk_tensor_4d_store(&tensors.dk.map, col, row, at.k_head, tensors.dk.batch(at.b), dk_s + offset);
      }
      ptx::cp_async_bulk_commit_group();
    }
    leaving = true;
  }
  if (thread == 0) ptx::cp_async_bulk_wait_group<0>();  // shared memory is read until then
}

template <class Config, class Element, bool kPlain>
__global__ void __launch_bounds__(Config::kTile.threads(), 1)
    backward_kernel(const __grid_constant__ Problem p, const __grid_constant__ BackwardTensors tensors,
                    const __grid_constant__ BackwardSchedule schedule) {
  constexpr BackwardTile kTile = Config::kTile;
  using Shared = BackwardShared<Config>;
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  const uint32_t shared = ptx::shared_address(shared_memory);
  if (threadIdx.x == 0) {
    constexpr int kWarps = kTile.kConsumers * 4;
    Ring<1>{shared + Shared::kKRing}.init(kWarps);
    Ring<Shared::kStages>{shared + Shared::kDoutRing}.init(kWarps);
    for (int s = 0; s < Shared::kStages; s++) {  // Q and the statistics come by two ways
      ptx::mbarrier_init(shared + Shared::kQRing + s * 16, 2);
      ptx::mbarrier_init(shared + Shared::kQRing + s * 16 + 8, kWarps);
    }
    for (int g = 0; g < kTile.kConsumers; g++) {
      ptx::mbarrier_init(shared + Shared::kDqRing + g * Ring<1>::kBytes, 4);
      ptx::mbarrier_init(shared + Shared::kDqRing + g * Ring<1>::kBytes + 8, 1);
    }
    ptx::fence_mbarrier_init();
    if (schedule.ordered) {
      int* const tickets = p.order.at<int>(p.batch(0)) + (p.T + 31) / 32;
      ptx::st_shared_b32(shared + Shared::kTicket, atomicAdd(tickets, 1));
    }
  }
  __syncthreads();  // barriers are there, and the ticket
  const uint32_t block = schedule.ordered ? ptx::ld_shared_b32(shared + Shared::kTicket) : blockIdx.x;

  const int warp = __shfl_sync(~0u, int(threadIdx.x / 32), 0);
  if (warp < 4) {
    ptx::setmaxnreg_dec<kTile.producer_registers()>();
    if (warp == 0) {
      if (ptx::elect_sync()) feed_tiles<Config>(p, tensors, schedule, block, shared);
    } else if (warp == 1) {
      feed_statistics<Config>(p, schedule, block, shared);
    } else {
      if (ptx::elect_sync()) drain_queries<Config>(p, schedule, block, shared, warp - 2);
    }
  } else {
    ptx::setmaxnreg_inc<kTile.consumer_registers()>();
    compute<Config, Element, kPlain>(p, tensors, schedule, block, shared, warp / 4 - 1);
  }
}

// Enqueues one body; the other need not exist.
template <class Config, class Element, bool kPlain>
Status launch_backward(const Problem& p, const BackwardSchedule& schedule, cudaStream_t stream) {
  using Shared = BackwardShared<Config>;
  using QTile = typename Shared::QTile;
  using KTile = typename Shared::KTile;
  BackwardTensors tensors;
  const TensorMapEncoder encoder = find_tensor_map_encoder();
  const bool queries = p.T > 0;  // without queries Q and dO have no memory to point at, and nobody looks
  const TensorMapShape q_shape{queries ? p.T : p.S, queries ? p.N : p.K, p.D, QTile::kPanelCols, QTile::kRows};
  const TensorMapShape kv_shape{p.S, p.K, p.D, KTile::kPanelCols, KTile::kRows};
  const TensorMapShape out_shape{p.S, p.K, p.D, KTile::kPanelCols, 64};
  for (const Status status : {encode_tensor_map(encoder, p, queries ? p.q : p.k, q_shape, &tensors.q),
                              encode_tensor_map(encoder, p, queries ? p.dout : p.k, q_shape, &tensors.dout),
                              encode_tensor_map(encoder, p, p.k, kv_shape, &tensors.k),
                              encode_tensor_map(encoder, p, p.v, kv_shape, &tensors.v),
                              encode_tensor_map(encoder, p, p.dk, out_shape, &tensors.dk),
                              encode_tensor_map(encoder, p, p.dv, out_shape, &tensors.dv)}) {
    if (!status.ok()) return status;
  }
  return launch_kernel(backward_kernel<Config, Element, kPlain>, schedule.blocks(), Config::kTile.threads(),
                       Shared::kBytes, stream, p, tensors, schedule);
}

template <class Config, class Element>
Status backward_with(const Problem& p, cudaStream_t stream) {
  if (p.spec.deterministic && !p.order.present()) return {"a deterministic backward needs its order workspace"};
  BackwardSchedule schedule{};
  schedule.parts = 1;
  if (p.S > 0) {
    if (const Status s = backward_schedule<Config>(p, &schedule); !s.ok()) return s;
  }
  const bool split = schedule.parts > 1;
  if (p.T > 0) {
    if (const Status s = delta<Element>(p, split, stream); !s.ok()) return s;
  }
  if (p.S > 0) {
    const Status s = p.plain() ? launch_backward<Config, Element, true>(p, schedule, stream)
                               : launch_backward<Config, Element, false>(p, schedule, stream);
    if (!s.ok()) return s;
  }
  if (split) {
    if (const Status s = convert<Element, Gradient::kKey>(p, stream); !s.ok()) return s;
    if (const Status s = convert<Element, Gradient::kValue>(p, stream); !s.ok()) return s;
  }
  return p.T > 0 ? convert_queries<Element>(p, stream) : Status{};
}

// The entry point that generated units instantiate: heads of up to kHeadDim columns.
template <class Element, int kHeadDim>
Status backward(const Problem& p, cudaStream_t stream) {
  if (p.B == 0 || p.N == 0) return {};
  return backward_with<BackwardConfig<kHeadDim>, Element>(p, stream);
}

}  // namespace jax_flash2::cuda::sm90
