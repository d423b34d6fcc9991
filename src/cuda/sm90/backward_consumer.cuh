// What a computing warpgroup of the backward does whatever its tile's kind: it walks the block's key tiles and the query
// tiles that each meets, turns scores into P and dS, and writes dK and dV. The products are those of the kind
// (sm90/backward_narrow.cuh, backward_wide.cuh). Asks Mask, Score and Operands; knows no feature.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "core/problem.h"
#include "cuda/backward_operands.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/stmatrix.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/warpgroup.cuh"
#include "cuda/score.cuh"
#include "cuda/sm90/backward_plan.cuh"
#include "cuda/sm90/backward_rows.cuh"
#include "cuda/tile/accumulator.cuh"
#include "cuda/tile/columns.cuh"

namespace jax_flash2::cuda::sm90 {

// Which of the queries `query` + 0 1 8 9 16 17 .. see the key `key`, and the one 8 further on: a bit each.
struct Seen {
  uint32_t bits[2] = {~0u, ~0u};

  Seen() = default;
  __device__ __forceinline__ Seen(const Mask& mask, int key, int query) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      // A span is read whole, not one end after the other.
      const Range queries = mask.query_spans ? mask.span_of_key(key + 8 * h).range() : mask.queries(key + 8 * h);
      bits[h] = tile::column_bits({queries.begin - query, queries.end - query});
    }
  }
};

// What a lane has of a step's scores, transposed, of the keys and queries of a Seen. `statistics` is where the first
// query's stand in shared memory: -lse, see feed_statistics, and kToDelta further on delta.
template <bool kPlain, bool kMasked, int kCols8, int kToDelta>
struct Scores {
  using Pairs = Lines<false, 2 * kCols8>;

  const Score<float>& score;
  Seen& seen;
  int key, query;
  uint32_t statistics;
  const BackwardOperands& operands;             // of the general body
  int queries;                                  // that exist
  float bias[2][kPlain ? 1 : 2 * kCols8] = {};  // read only where there is one, but left unset it spills

  // Of the general body, before the products are there.
  __device__ __forceinline__ void look() {
    if (score.softcap == 0) operands.ask(operands.acts, Pairs{query, key}, seen.bits, bias);
  }

  // P from products; in the general body before dropout, and not where dS asks for scores.
  __device__ __forceinline__ void probabilities(float (&s)[kCols8][4], float scale_log2) const {
    if constexpr (kPlain) {
#pragma unroll
      for (int j = 0; j < kCols8; j++) {
        const float2 lse = lses(j);
#pragma unroll
        for (int e = 0; e < 4; e++) {
          s[j][e] = ptx::ex2(fmaf(s[j][e], scale_log2, e % 2 ? lse.y : lse.x));
          if (!is_seen(j, e)) s[j][e] = 0;
        }
        stay_behind(j);
      }
    } else {
      operands.probabilities(
          Pairs{query, key}, seen.bits, bias, score, Power{}, [&](int x) { return lses(x / 2); },
          [&](int h, int x) -> float& { return s[x / 2][2 * h + x % 2]; });
    }
  }

  // dS in the place of dP; of the general body also P, after dropout, in the place of what `probabilities` has left.
  __device__ __forceinline__ void gradients(float (&s)[kCols8][4], float (&dp)[kCols8][4]) const {
    if constexpr (kPlain) {
#pragma unroll
      for (int j = 0; j < kCols8; j++) {
        const float2 delta = deltas(j);
#pragma unroll
        for (int e = 0; e < 4; e++) {
          dp[j][e] = s[j][e] * (dp[j][e] - (e % 2 ? delta.y : delta.x));
          if (!is_seen(j, e)) dp[j][e] = 0;
        }
        stay_behind(j);
      }
    } else {
      uint32_t kept[2];
      operands.keep(Pairs{query, key}, kept);
      operands.differentiate(
          Pairs{query, key}, seen.bits, kept, queries, score, Power{}, [&](int x) { return lses(x / 2); },
          [&](int x) { return deltas(x / 2); }, [&](int h, int x) -> float& { return s[x / 2][2 * h + x % 2]; },
          [&](int h, int x) -> float& { return dp[x / 2][2 * h + x % 2]; });
    }
  }

 private:
  __device__ __forceinline__ bool is_seen(int j, int e) const {
    return !kMasked || (seen.bits[e / 2] >> (2 * j + e % 2) & 1);
  }
  // Of a masked tile of 128 queries: keeps ptxas from reading statistics ahead, for which there are no registers.
  static __device__ __forceinline__ void stay_behind(int j) {
    if (kMasked && kCols8 >= 16 && j % 4 == 3) __syncwarp();
  }
  __device__ __forceinline__ float2 lses(int j) const { return ptx::ld_shared_v2_f32(statistics + j * 32); }
  __device__ __forceinline__ float2 deltas(int j) const {
    return ptx::ld_shared_v2_f32(statistics + kToDelta + j * 32);
  }
};

// What a kind of tile starts from.
template <class Config>
struct BackwardConsumer {
  static constexpr BackwardTile kTile = Config::kTile;
  static constexpr int kAllBarrier = 1, kGroupBarrier = 2;  // named; one of all who compute, one a warpgroup
  static constexpr int kAll = 128 * kTile.kConsumers;
  static constexpr int kKeyCols = kTile.key_cols(), kValueCols = kTile.value_cols(), kOwn = kTile.own_queries();
  using Shared = BackwardShared<Config>;

  const Problem& p;
  const BackwardTensors& tensors;
  const BackwardSchedule& schedule;
  const uint32_t shared, thread, lane;  // shared memory's first byte; a thread of the warpgroup, a lane
  const int group;                      // which warpgroup
  Ring<1> k_ring, dq_ring;
  Ring<Shared::kStages> q_ring;
  // Of the key tile: what its scores go through, and 16 rows a warp of dK and dV.
  Score<float> score{};
  float scale_log2 = 0;
  float dk[kKeyCols / 8][4], dv[kValueCols / 8][4];

  __device__ __forceinline__ BackwardConsumer(const Problem& p, const BackwardTensors& tensors,
                                              const BackwardSchedule& schedule, uint32_t shared, int group)
      : p(p),
        tensors(tensors),
        schedule(schedule),
        shared(shared),
        thread(threadIdx.x % 128),
        lane(threadIdx.x % 32),
        group(group),
        k_ring{shared + Shared::kKRing},
        dq_ring{shared + Shared::kDqRing + group * Ring<1>::kBytes},
        q_ring{shared + Shared::kQRing} {}

  // Of a tile's, the first of those whose scores this warpgroup works out.
  __device__ __forceinline__ int first_query() const { return kTile.wide ? group * kOwn : 0; }

  template <class Action>
  __device__ __forceinline__ void one_a_warp(const Action& action) const {
    if (lane == 0) action();
  }
  __device__ __forceinline__ void sync_all() const { ptx::bar_sync(kAllBarrier, kAll); }
  __device__ __forceinline__ void sync_group() const { ptx::bar_sync(kGroupBarrier + group, 128); }

  // Of bodies that have any; of the head of the step.
  __device__ __forceinline__ BackwardOperands& operands() const {
    const uint32_t at = shared + Shared::kOperands + group * Shared::kOperandsBytes;
    return *static_cast<BackwardOperands*>(__cvta_shared_to_generic(at));
  }
  template <Body kBody, class Plans>
  __device__ __forceinline__ void begin_head(const Plans& plans, int n) const {
    sync_group();  // nobody reads those of the head before
    if (thread == 0) {
      operands().mask = plans.mask(p);
      operands().template set_head<kBody>(p, plans.batch(), n);
    }
    sync_group();
  }

  // By a step. key, query: the first ones of `lane`, which, like `shared`, the step has worked out for itself.
  template <Body kBody, bool kMasked>
  __device__ __forceinline__ auto make_scores(uint32_t shared, uint32_t lane, Seen& seen, int key, int query) const {
    return Scores<kBody != Body::kGeneral, kMasked, kOwn / 8, kTile.queries * 4>{
        score,
        seen,
        key,
        query,
        shared + Shared::kStatistics + q_ring.stage * Shared::kStatisticsBytes + first_query() * 4 + lane % 4 * 8,
        operands(),
        p.T};
  }

  // By a step, of what it masks. `mask`: the batch row's.
  template <Body kBody>
  __device__ __forceinline__ Seen see(const Mask& mask, int key, int query) const {
    Seen seen(mask, key, query);
    if constexpr (kBody == Body::kRemoving) {
      const Operands& known = operands();
      known.ask_who(known.acts, Lines<false, kOwn / 4>{query, key}, seen.bits);
    }
    return seen;
  }

  __device__ __forceinline__ void begin(const KeyTile& at) {
    score = p.score<float>(at.b, at.n_begin), scale_log2 = score.scale * kLog2e;
#pragma unroll
    for (int x = 0; x < kKeyCols / 2; x++) dk[x / 4][x % 4] = 0;
#pragma unroll
    for (int x = 0; x < kValueCols / 2; x++) dv[x / 4][x % 4] = 0;
  }

  // To their accumulators, or the start of their way out by TMA, whose maps keep rows and columns past the tensors from
  // being written. key0: the first of the warpgroup's keys; its columns are the group-th part of all that there are where
  // the tile is wide.
  template <class Element>
  __device__ __forceinline__ void write_keys(const KeyTile& at, int key0) {
    const uint32_t warp = thread / 32;
    const int part = kTile.wide ? group : 0;
    if (schedule.parts > 1) {
      const auto add = [&]<int kCols8>(const float (&x)[kCols8][4], float* to, int cols) {
        tile::add_fragments<false, 1>(reinterpret_cast<const float (&)[1][kCols8][4]>(x), to, {p.S, cols},
                                      key0 + int(warp) * 16, part * kCols8 / 2);
      };
      add(dk, p.dk_acc.at<float>(at.b, at.k_head), p.D);
      add(dv, p.dv_acc.at<float>(at.b, at.k_head), p.Dv);
      return;
    }
    const int lane_key = key0 + int(warp) * 16 + int(lane) / 4;
    const Live live_keys = at.mask.live_keys();
    const bool live[2] = {live_keys.has(lane_key), live_keys.has(lane_key + 8)};  // else not even 0 times a NaN
    const auto stage = [&]<class Tile, int kCols8>(Tile, const float (&x)[kCols8][4], uint32_t tile, float scale) {
      const uint32_t lane_s = tile + Tile::offset(warp * 16 + lane % 16, lane / 16);
      const auto pair = [&](int j, int h) {
        return live[h] ? ptx::cvt_x2<Element>(x[j][2 * h] * scale, x[j][2 * h + 1] * scale) : 0u;
      };
#pragma unroll
      for (int c = 0; c < kCols8 / 2; c++) {
        ptx::stmatrix_x4(Tile::advance(lane_s, 0, c), pair(2 * c, 0), pair(2 * c, 1), pair(2 * c + 1, 0),
                         pair(2 * c + 1, 1));
      }
    };
    const auto send = [&]<class Tile>(Tile, const MappedTensor& to, uint32_t tile) {
#pragma unroll
      for (int panel = 0; panel < Tile::kPanels; panel++) {
        ptx::cp_async_bulk_tensor_4d_store(&to.map, part * Tile::kCols + panel * Tile::kPanelCols, key0, at.k_head,
                                           to.batch(at.b), tile + panel * Tile::kPanelBytes);
      }
    };
    using DkTile = typename Shared::DkTile;
    using DvTile = typename Shared::DvTile;
    const uint32_t dk_s = shared + Shared::kDkOut + group * DkTile::kBytes;
    const uint32_t dv_s = shared + Shared::kDvOut + group * DvTile::kBytes;
    stage(DvTile{}, dv, dv_s, 1.0f);
    stage(DkTile{}, dk, dk_s, p.score<float>(at.b, at.n_begin).scale);
    ptx::fence_proxy_async();
    sync_group();
    if (thread == 0) {
      send(DvTile{}, tensors.dv, dv_s);
      send(DkTile{}, tensors.dk, dk_s);
      ptx::cp_async_bulk_commit_group();
    }
  }
};

// By whole warpgroups: all key tiles of the block. Kind has step<kMasked>(plans, query head, query tile), end_of_head(),
// and finish(key tile), which writes dK and dV and gives K and V back.
template <class Config, class Element, Body kBody, class Kind>
__device__ __forceinline__ void compute(Kind& kind) {
  constexpr BackwardTile kTile = Config::kTile;
  using Shared = BackwardShared<Config>;
  using KTile = typename Shared::KTile;
  const Problem& p = kind.p;
  Plans<Config, kBody != Body::kPlain> plans(kind.shared);
#pragma unroll 1
  for (; plans.next(); plans.done()) {
    const KeyTile at = plans.current(p);
    const int key0 = at.tile * kTile.keys();
    if (at.tiles.begin >= at.tiles.end) {
      const int own = key0 + (kTile.wide ? 0 : kind.group * 64);
      if (kind.schedule.parts == 1 && !(kTile.wide && kind.group > 0)) {  // else the accumulators are clear
        clear_rows(p.dk.template at<Element>(at.b, at.k_head), p.dk.row, own, p.S, p.D);
        clear_rows(p.dv.template at<Element>(at.b, at.k_head), p.dv.row, own, p.S, p.Dv);
      }
      continue;
    }
    kind.k_ring.wait_full();
    kind.begin(at);
    clear_dead_rows<KTile>(kind.shared + Shared::kK, key0, p.S, at.mask.live_keys(), kind.kGroupBarrier + kind.group);
    // Bounds are read where they are needed: there are no registers to keep them.
#pragma unroll 1
    for (int n = at.n_begin; n < plans.n_end(); n++) {
      if constexpr (kBody >= Body::kRemoving) kind.template begin_head<kBody>(plans, n);
      int m = plans.tiles().begin;
      if constexpr (kBody != Body::kGeneral) {
#pragma unroll 1
        for (const int end = plans.tiles().full_begin; m < end; m++) kind.template step<true>(plans, n, m);
#pragma unroll 1
        for (const int end = plans.tiles().full_end; m < end; m++) kind.template step<false>(plans, n, m);
      }
#pragma unroll 1
      for (const int end = plans.tiles().end; m < end; m++) kind.template step<true>(plans, n, m);
      kind.end_of_head();
    }
    kind.finish(plans.current(p));  // not kept through the loops
  }
  if (kind.thread == 0) ptx::cp_async_bulk_wait_group<0>();  // shared memory is read until then
}

}  // namespace jax_flash2::cuda::sm90
