// What one warp of a block of the backward does under its products where that is worth it: delta and cleared accumulators
// for the heads of tiles to come, dq of heads that are done. Else these are kernels of their own (delta.cuh,
// convert_queries.cuh). Knows tiles of queries, no scores.
//
// The blocks share all chores, and tell each other by two counters of a head: `prepared` before anybody adds to its
// accumulators, `added` before they are converted.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "core/problem.h"
#include "cuda/delta.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/sm90/backward_plan.cuh"
#include "cuda/tile/row_blocks.cuh"

namespace jax_flash2::cuda::sm90 {

template <class Config, class Element, bool kSpans>
struct Chores {
  using Shared = BackwardShared<Config>;
  using DoutTile = typename Shared::DoutTile;
  static constexpr int kQueries = Config::kTile.queries, kBlock = tile::RowBlocks::kRows;

  const Problem& p;
  const BackwardTensors& tensors;
  const BackwardSchedule& schedule;
  const uint32_t buffer, lane;
  Ring<1> ring;  // of the one buffer; only its "full" is used

  __device__ __forceinline__ Chores(const Problem& p, const BackwardTensors& tensors, const BackwardSchedule& schedule,
                                    uint32_t shared)
      : p(p),
        tensors(tensors),
        schedule(schedule),
        buffer(shared + Shared::kChores),
        lane(threadIdx.x % 32),
        ring{shared + Shared::kChoreRing} {}

  // By a whole warp.
  __device__ __forceinline__ void run() {
    const ChoreQueue queue = schedule.chore_queue();
#pragma unroll 1
    for (;;) {
      const int drawn = lane == 0 ? atomicAdd(p.counter(HeadCounter::kChores), 1) : 0;
      const uint32_t x = __shfl_sync(~0u, drawn, 0);
      if (x >= queue.size()) return;
      if (x < queue.units) share(x, true);
      if (x >= queue.ahead) share(x - queue.ahead, false);
    }
  }

 private:
  // Whether all queries of a tile are alive: asked while the tile is on its way. What is done with the dead ones, which may
  // hold NaN, is undone afterwards.
  __device__ __forceinline__ bool are_alive(const Batch& b, int row0, int rows) const {
    const Live live = p.mask<kSpans>(b).live_queries();
    bool alive = true;
    for (int row = lane; row < rows; row += 32) alive &= live.has(row0 + row);
    return __all_sync(~0u, alive);
  }
  // Calls clear(row) for those of the tile that are not.
  template <class Clear>
  __device__ __forceinline__ void clear_dead(const Batch& b, int row0, int rows, const Clear& clear) const {
    const Live live = p.mask<kSpans>(b).live_queries();
    __syncwarp();  // other lanes have written
#pragma unroll 1
    for (int row = lane; row < rows; row += 32) {
      if (!live.has(row0 + row)) clear(row);
    }
  }

  // What goes with a unit of a head's query tiles: every so many-th.
  __device__ __forceinline__ void share(uint32_t unit, bool prepares) {
    const uint32_t units = schedule.lists.units_of_head(), head = unit / units, part = unit % units;
    const int k_head = head % p.K, batch_row = head / p.K;
    const Batch b = p.batch(batch_row);
    const uint32_t tiles = (p.T + kQueries - 1) / kQueries;
    HeadCounters counters(p, batch_row, k_head);
    if (!prepares) counters.wait_added(units);
#pragma unroll 1
    for (int n = k_head * p.group(); n < (k_head + 1) * p.group(); n++) {
#pragma unroll 1
      for (uint32_t m = part; m < tiles; m += units) {
        if (prepares) {
          prepare(b, n, int(m) * kQueries);
        } else {
          convert(b, n, int(m) * kQueries);
        }
      }
    }
    if (prepares) counters.tell_prepared();
  }

  __device__ __forceinline__ void prepare(const Batch& b, int n, int row0) {
    ptx::fence_proxy_async();  // the buffer was read, or written, before
    __syncwarp();
    if (lane == 0) {
      ptx::mbarrier_arrive_expect_tx(ring.full(), 2 * DoutTile::kBytes);
      const auto load = [&](const MappedTensor& from, uint32_t to) {
#pragma unroll
        for (int panel = 0; panel < DoutTile::kPanels; panel++) {
          ptx::cp_async_bulk_tensor_4d_load(to + panel * DoutTile::kPanelBytes, &from.map, panel * DoutTile::kPanelCols,
                                            row0, n, from.batch(b), ring.full(), ptx::kEvictFirst);
        }
      };
      load(tensors.out, buffer), load(tensors.dout, buffer + DoutTile::kBytes);
    }
    const int rows = min_(p.T - row0, kQueries);
    float* const acc = p.dq_acc.at<float>(b, n) + int64_t(row0) * p.D;
    for (int x = lane * 4; x < rows * p.D; x += 128) *reinterpret_cast<float4*>(acc + x) = float4{};
    const bool all_alive = are_alive(b, row0, rows);
    ring.wait_full();
    ring.next();
#pragma unroll 1
    for (int row = lane; row < rows; row += 32) {
      float sum = 0;
#pragma unroll 4
      for (int chunk = 0; chunk < DoutTile::kCols / 8; chunk++) {
        const uint32_t at = buffer + DoutTile::offset(row, chunk);
        const uint4 x = ptx::ld_shared_v4(at), y = ptx::ld_shared_v4(at + DoutTile::kBytes);
        const auto add = [&](uint32_t o, uint32_t g) {
          const float2 u = to_float2<Element>(o), w = to_float2<Element>(g);
          sum = fmaf(u.x, w.x, fmaf(u.y, w.y, sum));
        };
        add(x.x, y.x), add(x.y, y.y), add(x.z, y.z), add(x.w, y.w);
      }
      const int t = row0 + row;
      if (p.dlse.present()) sum -= p.dlse.at<const float>(b, n)[t * p.dlse.row];
      p.delta.at<float>(b, n)[t * p.delta.row] = sum;
    }
    if (all_alive) return;
    float* const delta = p.delta.at<float>(b, n) + int64_t(row0) * p.delta.row;
    clear_dead(b, row0, rows, [&](int row) { delta[row * p.delta.row] = 0; });
  }

  __device__ __forceinline__ void convert(const Batch& b, int n, int row0) {
    const int rows = min_(p.T - row0, kQueries);
    ptx::fence_proxy_async();
    __syncwarp();
    if (lane == 0) {
      ptx::mbarrier_arrive_expect_tx(ring.full(), rows * p.D * 4);
      ptx::cp_async_bulk_load(buffer, p.dq_acc.at<const float>(b, n) + int64_t(row0) * p.D, rows * p.D * 4,
                              ring.full());
    }
    const bool all_alive = are_alive(b, row0, rows);
    const float scale = p.score<float>(b, n).scale;
    Element* const dq = p.dq.at<Element>(b, n) + int64_t(row0) * p.dq.row;
    const auto write = [&](int row, int col, uint4 x) { *reinterpret_cast<uint4*>(dq + row * p.dq.row + col) = x; };
    const auto pair = [&](float x, float y) { return ptx::cvt_x2<Element>(x * scale, y * scale); };
    ring.wait_full();
    ring.next();
    // Whole blocks of 16 rows: a lane has 8 columns of two rows, 64 bytes. It begins with another 16 of them than its
    // neighbours, for the sake of the banks, and turns what it has back.
    const int turn = lane / 2 % 4, whole = rows / kBlock * kBlock;
#pragma unroll 1
    for (int row = lane % 8; row < whole; row += kBlock) {
#pragma unroll 1
      for (int col = lane / 8 * 8; col < p.D; col += 32) {
        const uint32_t from = buffer + (row / kBlock * kBlock * p.D + col * kBlock + row % 8 * 16) * 4;
        uint32_t upper[4], lower[4];
#pragma unroll
        for (int x = 0; x < 4; x++) {
          const float4 y = ptx::ld_shared_v4_f32(from + (x + turn) % 4 * 16);
          upper[x] = pair(y.x, y.y), lower[x] = pair(y.z, y.w);
        }
        const auto turned_back = [&](const uint32_t (&x)[4]) {
          const bool one = turn & 1, two = turn & 2;
          const uint32_t a = one ? x[3] : x[0], b = one ? x[0] : x[1], c = one ? x[1] : x[2], d = one ? x[2] : x[3];
          return uint4{two ? c : a, two ? d : b, two ? a : c, two ? b : d};
        };
        write(row, col, turned_back(upper)), write(row + 8, col, turned_back(lower));
      }
    }
#pragma unroll 1
    for (int x = whole * p.D + lane * 8; x < rows * p.D; x += 256) {
      const float4 y = ptx::ld_shared_v4_f32(buffer + x * 4), z = ptx::ld_shared_v4_f32(buffer + x * 4 + 16);
      write(x / p.D, x % p.D, {pair(y.x, y.y), pair(y.z, y.w), pair(z.x, z.y), pair(z.z, z.w)});
    }
    if (all_alive) return;
    clear_dead(b, row0, rows, [&](int row) {
      for (int col = 0; col < p.D; col += 8) write(row, col, {});
    });
  }
};

}  // namespace jax_flash2::cuda::sm90
