// The backward pass on mma.sync (compute capability 8.0 and newer), FlashAttention-2's way: a block owns a tile of keys of
// one head and walks the query tiles that its mask leaves; dK and dV stay in registers, dQ is added to memory. Asks Mask,
// Score and Operands, and never knows which feature it serves.
//
// Scores are computed transposed (keys x queries), so that P and dS leave the tensor cores as the operands that dV = P dO
// and dK = dS Q want, in registers. Only dS, which dQ = dS^T K wants the other way round, goes through shared memory, and
// the queries that another warp of the same keys has. Letters below: p_r, ds_r are keys x queries.
#pragma once
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "core/problem.h"
#include "cuda/backward_operands.cuh"
#include "cuda/convert.cuh"
#include "cuda/delta.cuh"
#include "cuda/launch_kernel.cuh"
#include "cuda/operands.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/score.cuh"
#include "cuda/score_gradients.cuh"
#include "cuda/sm80/backward_plan.cuh"
#include "cuda/sm80/config.cuh"
#include "cuda/sm80/config_backward.cuh"
#include "cuda/tile/accumulator.cuh"
#include "cuda/tile/columns.cuh"
#include "cuda/tile/copy.cuh"
#include "cuda/tile/fragment.cuh"
#include "cuda/tile/shared_tile.cuh"

namespace jax_flash2::cuda::sm80 {

// A barrier of all warps whose arrival and wait are apart. Each warp arrives with one lane, after its own barrier. A race
// checker, which follows lanes and not warps, takes that for a race: for it alone every lane arrives.
struct Gate {
#ifdef JAX_FLASH2_RACECHECK
  static constexpr int kArrivals = 32;
#else
  static constexpr int kArrivals = 1;  // of a warp
#endif
  uint32_t address;

  __device__ __forceinline__ void arrive() const {
    __syncwarp();  // the arriving lane speaks for the others
    if (threadIdx.x % 32 < kArrivals) ptx::mbarrier_arrive(address);
  }
  __device__ __forceinline__ void wait(uint32_t parity) const {
    while (!ptx::mbarrier_test_wait_parity(address, parity)) {
    }
  }
};

// to += a b, one step of 16 in depth; b's blocks of 16 columns are asked for one by one.
template <class Element, int kRowBlocks, int kCols8, class Load>
__device__ __forceinline__ void multiply(float (&to)[kRowBlocks][kCols8][4], const uint32_t (&a)[kRowBlocks][4],
                                         const Load& load) {
#pragma unroll
  for (int c = 0; c < kCols8 / 2; c++) {
    uint32_t b[4];
    load(b, c);
#pragma unroll
    for (int i = 0; i < kRowBlocks; i++) {
      ptx::mma_m16n8k16<Element>(to[i][2 * c], a[i], b[0], b[1]);
      ptx::mma_m16n8k16<Element>(to[i][2 * c + 1], a[i], b[2], b[3]);
    }
  }
}

// A step of a block's walk: query head and query tile.
struct QueryStep {
  int n, tile;
};

// kBody: kPlain, or kGeneral for all others.
template <class Config, class Element, Body kBody>
__global__ void __launch_bounds__(Config::kTile.threads(), Config::kTile.blocks_per_sm)
    backward_kernel(const __grid_constant__ Problem p, const BackwardOrder order, const int stages) {
  static_assert(Config::kTile.valid());
  constexpr bool kPlain = kBody == Body::kPlain;
  using KTile = tile::SharedTile<Config::kTile.keys, Config::kTile.head_dim>;
  using QTile = tile::SharedTile<Config::kTile.queries, Config::kTile.head_dim>;
  using DsTile = tile::SharedTile<Config::kTile.keys, Config::kTile.queries>;
  using CopyK = tile::Copy<KTile, Config::kTile.threads()>;
  using CopyQ = tile::Copy<QTile, Config::kTile.threads()>;
  using tile::Lies;
  // In blocks of 16: a warp's keys, its queries at a time and in all, its columns of dK and dV, its part of dQ.
  constexpr int kKeyBlocks = Config::kTile.warp_keys() / 16, kSubBlocks = Config::kTile.sub_queries / 16;
  constexpr int kQueryBlocks = Config::kTile.warp_queries() / 16, kSubs = kQueryBlocks / kSubBlocks;
  constexpr int kAcross = Config::kTile.warps_across, kColBlocks = Config::kTile.head_dim / 16 / kAcross;
  constexpr int kDqAcross = Config::kTile.warps_dq_cols(),
                kDqRowBlocks = Config::kTile.queries / 16 / Config::kTile.warps_dq_rows;
  constexpr int kDqColBlocks = Config::kTile.head_dim / 16 / kDqAcross, kDepth = Config::kTile.head_dim / 16;

  using DqFragments = float[kDqRowBlocks][2 * kDqColBlocks][4];

  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t k_s = ptx::shared_address(shared), v_s = k_s + KTile::kBytes, ds_s = v_s + KTile::kBytes;
  const uint32_t p_s = ds_s + DsTile::kBytes, rest_s = p_s + Config::kTile.p_bytes(),
                 q_s = rest_s + Config::kTile.kRestBytes;
  constexpr uint32_t kStage = 2 * QTile::kBytes, kDout = QTile::kBytes;  // a stage is Q, then dO
  const uint32_t statistics_s = rest_s;                                  // -lse_log2[queries], delta[queries]
  const uint32_t gates_s = rest_s + 2 * Config::kTile.queries * 4;
  const Gate arrived{gates_s}, exchanged{gates_s + 8}, left{gates_s + 16};

  uint32_t ticket = blockIdx.x;
  if (threadIdx.x == 0) {
    for (uint32_t gate : {arrived.address, exchanged.address, left.address})
      ptx::mbarrier_init(gate, Config::kTile.warps() * Gate::kArrivals);
    if (order.ordered) {
      ptx::st_shared_b32(gates_s + 24, atomicAdd(p.tickets(), 1));
    }
  }
  __syncthreads();  // the gates are there, and the ticket
  if (order.ordered) ticket = ptx::ld_shared_b32(gates_s + 24);

  const BackwardOrder::Place place = order.place(ticket);
  const int k_head = place.head % p.K, batch_row = place.head / p.K;
  const int heads_of_part = (p.group() + order.parts - 1) / order.parts;
  const int n_begin = k_head * p.group() + place.part * heads_of_part;
  const int n_end = min_(n_begin + heads_of_part, (k_head + 1) * p.group());
  const Batch b = p.batch(batch_row);

  // In shared memory, for registers are full: where this batch row begins, which takes 100 instructions to work out, and
  // the general body's operands, of the head of the step.
  enum Base { kQ, kDoutBase, kLse, kDelta, kDqAcc, kBases };
  const uint32_t bases_s = gates_s + 32;
  const auto base = [&](Base of) { return ptx::ld_shared_b64(bases_s + of * 8); };
  BackwardOperands* const operands_s = reinterpret_cast<BackwardOperands*>(shared + (bases_s - k_s) + kBases * 8);
  static_assert(2 * Config::kTile.queries * 4 + 32 + kBases * 8 + sizeof(BackwardOperands) <= BackwardTile::kRestBytes);
  if (threadIdx.x == 0) {
    const auto keep_base = [&](Base of, const auto* at) { ptx::st_shared_b64(bases_s + of * 8, uint64_t(at)); };
    keep_base(kQ, p.q.at<const Element>(b)), keep_base(kDoutBase, p.dout.at<const Element>(b));
    keep_base(kLse, p.lse.at<const float>(b)), keep_base(kDelta, p.delta.at<const float>(b));
    keep_base(kDqAcc, p.dq_acc.at<float>(b));
    if constexpr (!kPlain) operands_s->mask = p.mask(b), operands_s->template set_head<kBody>(p, b, n_begin);
  }
  __syncthreads();  // they are there

  const Mask bounds = p.mask<false>(b);
  const auto mask = [&] { return kPlain ? bounds : operands_s->mask; };
  const int j0 = place.tile * Config::kTile.keys;
  const Tiles tiles = mask().query_tiles(j0, j0 + Config::kTile.keys, Config::kTile.queries);

  Element* const dk_g = p.dk.at<Element>(b, k_head);
  Element* const dv_g = p.dv.at<Element>(b, k_head);
  if (tiles.begin >= tiles.end) {
    if (order.parts > 1) return;  // the accumulators are clear
    constexpr int kChunks = Config::kTile.head_dim / 8;
    for (int x = threadIdx.x; x < Config::kTile.keys * kChunks; x += Config::kTile.threads()) {
      const int j = j0 + x / kChunks, column = x % kChunks * 8;
      if (j < p.S && column < p.D) *reinterpret_cast<uint4*>(dk_g + j * p.dk.row + column) = uint4{};
      if (j < p.S && column < p.Dv) *reinterpret_cast<uint4*>(dv_g + j * p.dv.row + column) = uint4{};
    }
    return;
  }

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_k = warp / kAcross, across = warp % kAcross;
  const int warp_dq = warp / kDqAcross, dq_across = warp % kDqAcross;

  // A warp's columns are blocks of 16 that lie kAcross apart, so that they are in the same places of each panel.
  const auto shifted = [](auto view, int col_block, auto tile_tag) {
    view.lane = decltype(tile_tag)::advance(view.lane, 0, col_block);
    return view;
  };
  const tile::BlockView<KTile, Lies::kStraight> k_view(k_s, warp_k * Config::kTile.warp_keys());
  const auto v_view = k_view.at(KTile::kBytes);
  const tile::BlockView<QTile, Lies::kAcross> q_view(q_s, across * Config::kTile.warp_queries());
  const auto q_cols_view = shifted(tile::BlockView<QTile, Lies::kStraight>(q_s), across, QTile{});
  const auto k_cols_view = shifted(tile::BlockView<KTile, Lies::kStraight>(k_s), dq_across, KTile{});
  const auto ds_rows_view = shifted(tile::BlockView<DsTile, Lies::kAcross>(ds_s), warp_dq * kDqRowBlocks, DsTile{});
  const tile::BlockView<DsTile, Lies::kStraight> ds_keys_view(ds_s, warp_k * Config::kTile.warp_keys());
  const auto ds_store =
      shifted(tile::StoreView<DsTile>(ds_s, warp_k * Config::kTile.warp_keys()), across * kQueryBlocks, DsTile{});
  // Fragment (i, c) of the keys' warp that has the queries `of`.
  const auto p_address = [&](int of, int i, int c) {
    return p_s + (((warp_k * kAcross + of) * kQueryBlocks + c) * kKeyBlocks + i) * 512 + lane * 16;
  };

  const CopyQ copy_q;
  const auto load = [&](QueryStep at, uint32_t stage) {
    const auto* const q_g = reinterpret_cast<const Element*>(base(kQ)) + at.n * p.q.head;
    const auto* const dout_g = reinterpret_cast<const Element*>(base(kDoutBase)) + at.n * p.dout.head;
    copy_q.load(q_s + stage, q_g, p.q.row, p.D, at.tile * Config::kTile.queries, mask().live_queries());
    copy_q.load(q_s + stage + kDout, dout_g, p.dout.row, p.Dv, at.tile * Config::kTile.queries, mask().live_queries());
    ptx::cp_async_commit_group();
  };
  // The first threads bring lse, the next ones delta, and turn them into what a step wants only when it is over: it need
  // not wait for memory. P of a dead row is 0, whatever its lse holds.
  const bool brings_lse = threadIdx.x < Config::kTile.queries;
  const auto read_statistic = [&](QueryStep at) {
    const int i = at.tile * Config::kTile.queries + threadIdx.x % Config::kTile.queries;
    float x = brings_lse ? INFINITY : 0.0f;
    if (threadIdx.x < 2 * Config::kTile.queries && mask().live_queries().has(i)) {
      const int64_t head = brings_lse ? p.lse.head : p.delta.head, row = brings_lse ? p.lse.row : p.delta.row;
      x = reinterpret_cast<const float*>(base(brings_lse ? kLse : kDelta))[at.n * head + i * row];
    }
    return x;
  };
  const auto publish_statistic = [&](float x) {
    if (brings_lse) x = x == -INFINITY ? x : kPlain ? -x * kLog2e : -x;
    if (threadIdx.x < 2 * Config::kTile.queries) ptx::st_shared_f32(statistics_s + threadIdx.x * 4, x);
  };

  const Score<float> score = p.score<float>(b, n_begin);
  const float scale_log2 = score.scale * kLog2e;
  float dk[kKeyBlocks][2 * kColBlocks][4] = {}, dv[kKeyBlocks][2 * kColBlocks][4] = {};
  uint32_t stage = 0, parity = 0;

  // masked: some pairs are not kept, or rows of the tile do not exist.
  const auto step = [&](auto masked, QueryStep at, QueryStep next, bool last) {
    constexpr bool kMasked = decltype(masked)::value;
    arrived.wait(parity);  // Q, dO and statistics of this step are there; the step before is over for every warp
    float statistic = 0;
    if (!last) {
      if (stages > 1) load(next, stage ^ kStage);
      statistic = read_statistic(next);
    }
    const int i0 = at.tile * Config::kTile.queries;

    const auto q_rows = q_view.at(stage), dout_rows = q_view.at(stage + kDout);
    constexpr uint32_t kRows = kQueryBlocks * 16 * QTile::kRowBytes;
    const auto q_own = q_cols_view.at(stage + across * kRows), dout_own = q_own.at(kDout);
#pragma unroll
    for (int sub = 0; sub < kSubs; sub++) {
      float s[kKeyBlocks][2 * kSubBlocks][4] = {}, dp[kKeyBlocks][2 * kSubBlocks][4] = {};
      const int first_block = sub * kSubBlocks;
      const int column0 = (across * kQueryBlocks + first_block) * 16 + lane % 4 * 2;  // in the tile, of element (0, 0)
      // Queries of the tile that see the key of row i, half h; less this lane's first column.
      const auto seen = [&](int i, int h) {
        const Range range = mask().queries(j0 + warp_k * Config::kTile.warp_keys() + i * 16 + h * 8 + lane / 4);
        return Range{range.begin - i0 - column0, range.end - i0 - column0};
      };
      // Column block j of S becomes P; in the general body later, beside dS.
      const auto probabilities = [&](int j) {
        if constexpr (kPlain) {
          const float2 lse = ptx::ld_shared_v2_f32(statistics_s + (column0 + 8 * j) * 4);  // negative, log2
#pragma unroll
          for (int i = 0; i < kKeyBlocks; i++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
              s[i][j][e] = ptx::ex2(fmaf(s[i][j][e], scale_log2, e % 2 ? lse.y : lse.x));
              if (kMasked && !seen(i, e / 2).has(8 * j + e % 2)) s[i][j][e] = 0;
            }
          }
        }
      };

      uint32_t a[kKeyBlocks][4];
#pragma unroll
      for (int d = 0; d < kDepth; d++) {
#pragma unroll
        for (int i = 0; i < kKeyBlocks; i++) k_view.load(a[i], i, d);
        multiply<Element>(s, a, [&](uint32_t (&x)[4], int c) { q_rows.load(x, first_block + c, d); });
      }
#pragma unroll
      for (int d = 0; d < kDepth; d++) {  // the exponentials are issued among the products
#pragma unroll
        for (int i = 0; i < kKeyBlocks; i++) v_view.load(a[i], i, d);
        multiply<Element>(dp, a, [&](uint32_t (&x)[4], int c) { dout_rows.load(x, first_block + c, d); });
        constexpr int kCols8 = 2 * kSubBlocks;
#pragma unroll
        for (int j = 0; j < kCols8; j++) {
          if (j * kDepth / kCols8 == d) probabilities(j);
        }
      }

      uint32_t p_r[kSubBlocks][kKeyBlocks][4], ds_r[kSubBlocks][kKeyBlocks][4];
      if constexpr (kPlain) {
#pragma unroll
        for (int j = 0; j < 2 * kSubBlocks; j++) {
          const float2 delta = ptx::ld_shared_v2_f32(statistics_s + (Config::kTile.queries + column0 + 8 * j) * 4);
#pragma unroll
          for (int i = 0; i < kKeyBlocks; i++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
              dp[i][j][e] = s[i][j][e] * (dp[i][j][e] - (e % 2 ? delta.y : delta.x));
              if (kMasked && !seen(i, e / 2).has(8 * j + e % 2)) dp[i][j][e] = 0;
            }
          }
        }
      } else {
        using Pairs = Lines<false, 4 * kSubBlocks>;
#pragma unroll
        for (int i = 0; i < kKeyBlocks; i++) {
          const int query = i0 + column0, key = j0 + warp_k * Config::kTile.warp_keys() + i * 16 + lane / 4;
          const Pairs lines{query, key};
          const auto statistics = [&](int x, int from) {  // -lse, natural, or delta
            return ptx::ld_shared_v2_f32(statistics_s + (from + column0 + tile::column_step(x)) * 4);
          };
          const auto lses = [&](int x) { return statistics(x, 0); };
          const auto score_at = [&](int h, int x) -> float& { return s[i][x / 2][2 * h + x % 2]; };
          uint32_t kept[2], left[2] = {tile::column_bits(seen(i, 0)), tile::column_bits(seen(i, 1))};
          float bias[2][4 * kSubBlocks];
          operands_s->keep(lines, kept);
          if (score.softcap == 0 && operands_s->acts.ask()) operands_s->call_ask(lines, left, bias);
          operands_s->probabilities(lines, left, bias, score, Power{}, lses, score_at);
          operands_s->differentiate(
              lines, left, kept, p.T, score, Power{}, lses, [&](int x) { return statistics(x, Config::kTile.queries); },
              score_at, [&](int h, int x) -> float& { return dp[i][x / 2][2 * h + x % 2]; });
        }
      }
#pragma unroll
      for (int c = 0; c < kSubBlocks; c++) {
#pragma unroll
        for (int i = 0; i < kKeyBlocks; i++) {
          tile::convert_c_to_a<Element>(p_r[c][i], s[i][2 * c], s[i][2 * c + 1]);
          tile::convert_c_to_a<Element>(ds_r[c][i], dp[i][2 * c], dp[i][2 * c + 1]);
          ds_store.store(ds_r[c][i][0], ds_r[c][i][1], i, 2 * (first_block + c));
          ds_store.store(ds_r[c][i][2], ds_r[c][i][3], i, 2 * (first_block + c) + 1);
          if (kAcross > 1) {
            const uint32_t (&x)[4] = p_r[c][i];
            ptx::st_shared_v4(p_address(across, i, first_block + c), {x[0], x[1], x[2], x[3]});
          }
        }
      }
      if (sub == kSubs - 1) exchanged.arrive();  // this warp's P and dS are there, and it has done with the statistics
#pragma unroll
      for (int c = 0; c < kSubBlocks; c++) {
        multiply<Element>(dv, p_r[c],
                          [&](uint32_t (&x)[4], int col) { dout_own.load_trans(x, first_block + c, col * kAcross); });
        multiply<Element>(dk, ds_r[c],
                          [&](uint32_t (&x)[4], int col) { q_own.load_trans(x, first_block + c, col * kAcross); });
      }
    }

    exchanged.wait(parity);
    if (!last) publish_statistic(statistic);
    if (!kPlain && !last && next.n != at.n && threadIdx.x == 0) operands_s->template set_head<kBody>(p, b, next.n);
#pragma unroll
    for (int t = 1; t < kAcross; t++) {  // the queries of the other warps of these keys
      const int other = (across + t) % kAcross;
      const auto q_other = q_cols_view.at(stage + other * kRows), dout_other = q_other.at(kDout);
      const auto ds_cols = shifted(ds_keys_view, other * kQueryBlocks, DsTile{});
#pragma unroll
      for (int c = 0; c < kQueryBlocks; c++) {
        uint32_t p_r[kKeyBlocks][4], ds_r[kKeyBlocks][4];
#pragma unroll
        for (int i = 0; i < kKeyBlocks; i++) {
          const uint4 x = ptx::ld_shared_v4(p_address(other, i, c));
          p_r[i][0] = x.x, p_r[i][1] = x.y, p_r[i][2] = x.z, p_r[i][3] = x.w;
          ds_cols.load(ds_r[i], i, c);
        }
        multiply<Element>(dv, p_r, [&](uint32_t (&x)[4], int col) { dout_other.load_trans(x, c, col * kAcross); });
        multiply<Element>(dk, ds_r, [&](uint32_t (&x)[4], int col) { q_other.load_trans(x, c, col * kAcross); });
      }
    }
    if (stages == 1) {
      left.arrive();
      left.wait(parity);  // every warp has done with Q and dO
      if (!last) load(next, 0);
    }

    DqFragments dq = {};
#pragma unroll
    for (int j = 0; j < Config::kTile.keys / 16; j++) {
      uint32_t a[kDqRowBlocks][4];
#pragma unroll
      for (int i = 0; i < kDqRowBlocks; i++) ds_rows_view.load_trans(a[i], j, i);
      multiply<Element>(dq, a, [&](uint32_t (&x)[4], int col) { k_cols_view.load_trans(x, j, col * kDqAcross); });
    }
    if (stages > 1) {
      ptx::cp_async_wait_group<0>();
      arrived.arrive();
    }

    int* turn = nullptr;
    int mine = 0;
    if (order.ordered) {
      mine = mask().key_tiles_before(place.tile, at.tile, Config::kTile.queries, Config::kTile.keys, order.descending);
      turn = p.order.at<int>(b, at.n) + at.tile;
      if (threadIdx.x == 0) {
        while (*reinterpret_cast<volatile int*>(turn) != mine) {
        }
        __threadfence();
      }
      __syncthreads();  // all blocks whose turn is earlier have added
    }
    float* const dq_g = reinterpret_cast<float*>(base(kDqAcc)) + at.n * p.dq_acc.head;
    tile::add_fragments<!kMasked, kDqAcross>(dq, dq_g, {p.T, p.D}, i0 + warp_dq * kDqRowBlocks * 16, dq_across);
    if (order.ordered) {
      __threadfence();
      __syncthreads();  // all warps have added
      if (threadIdx.x == 0) *reinterpret_cast<volatile int*>(turn) = mine + 1;
    }
    if (stages == 1) {
      ptx::cp_async_wait_group<0>();
      arrived.arrive();
    } else {
      stage ^= kStage;
    }
    parity ^= 1;
  };

  const CopyK copy_k;
  copy_k.load(k_s, p.k.at<const Element>(b, k_head), p.k.row, p.D, j0, mask().live_keys());
  copy_k.load(v_s, p.v.at<const Element>(b, k_head), p.v.row, p.Dv, j0, mask().live_keys());
  QueryStep at{n_begin, tiles.begin};
  load(at, 0);
  publish_statistic(read_statistic(at));
  ptx::cp_async_wait_group<0>();
  arrived.arrive();
#pragma unroll 1
  for (bool last = false; !last;) {
    QueryStep next{at.n, at.tile + 1};
    if (next.tile == tiles.end) next = {at.n + 1, tiles.begin};
    last = next.n == n_end;
    // Rows past T do not exist and have no place in dq_acc, so a ragged tile counts as masked.
    const bool full =
        tiles.full_begin <= at.tile && at.tile < tiles.full_end && (at.tile + 1) * Config::kTile.queries <= p.T;
    if (kPlain && full) {
      step(std::false_type{}, at, next, last);
    } else {
      step(std::true_type{}, at, next, last);
    }
    at = next;
  }

  if (order.parts > 1) {
    const int row0 = j0 + warp_k * Config::kTile.warp_keys();
    tile::add_fragments<false, kAcross>(dk, p.dk_acc.at<float>(b, k_head), {p.S, p.D}, row0, across);
    tile::add_fragments<false, kAcross>(dv, p.dv_acc.at<float>(b, k_head), {p.S, p.Dv}, row0, across);
    return;
  }
  // Out through the tiles of K and V, for 16-byte stores of whole lines.
  arrived.wait(parity);  // every warp has done with K and V
  const auto dk_store = shifted(tile::StoreView<KTile>(k_s, warp_k * Config::kTile.warp_keys()), across, KTile{});
  const auto dv_store = shifted(tile::StoreView<KTile>(v_s, warp_k * Config::kTile.warp_keys()), across, KTile{});
#pragma unroll
  for (int i = 0; i < kKeyBlocks; i++) {
    const int row = j0 + warp_k * Config::kTile.warp_keys() + i * 16 + lane / 4;
    const Live live_k = mask().live_keys();
    const bool upper = live_k.has(row), lower = live_k.has(row + 8);  // else not even 0 times a NaN
#pragma unroll
    for (int j = 0; j < 2 * kColBlocks; j++) {
      const float (&x)[4] = dk[i][j], (&y)[4] = dv[i][j];
      const int col8 = j / 2 * kAcross * 2 + j % 2;
      dk_store.store(upper ? ptx::cvt_x2<Element>(x[0] * score.scale, x[1] * score.scale) : 0,
                     lower ? ptx::cvt_x2<Element>(x[2] * score.scale, x[3] * score.scale) : 0, i, col8);
      dv_store.store(upper ? ptx::cvt_x2<Element>(y[0], y[1]) : 0, lower ? ptx::cvt_x2<Element>(y[2], y[3]) : 0, i,
                     col8);
    }
  }
  __syncthreads();  // rows are stored by other warps than wrote them
  copy_k.store(dk_g, p.dk.row, p.D, j0, p.S, k_s);
  copy_k.store(dv_g, p.dv.row, p.Dv, j0, p.S, v_s);
}

template <class Config, class Element>
Status backward_with(const Problem& p, const Device& device, cudaStream_t stream) {
  constexpr BackwardTile kTile = Config::kTile;
  const BackwardPlan<Config> plan(p, device);
  if (p.spec.deterministic && !p.order.present()) return {"a deterministic backward needs its order workspace"};
  const bool split = plan.order.parts > 1;
  if (p.T > 0) {
    if (const Status s = delta<Element>(p, split, stream); !s.ok()) return s;
    if (const Status s = clear_score_gradients(p, stream); !s.ok()) return s;
  }
  const auto kernel = p.body() == Body::kPlain ? backward_kernel<Config, Element, Body::kPlain>
                                               : backward_kernel<Config, Element, Body::kGeneral>;
  const int bytes = kTile.shared_bytes(plan.stages);
  const Status s = launch_kernel(kernel, plan.blocks, kTile.threads(), bytes, stream, p, plan.order, plan.stages);
  if (!s.ok()) return s;
  if (split) {
    if (const Status s = convert<Element, Gradient::kKey>(p, stream); !s.ok()) return s;
    if (const Status s = convert<Element, Gradient::kValue>(p, stream); !s.ok()) return s;
  }
  return convert<Element, Gradient::kQuery>(p, stream);
}

// The entry point that generated units instantiate: heads of up to kHeadDim columns, of V alike.
template <class Element, int kHeadDim, int kValueDim = kHeadDim>
Status backward(const Problem& p, cudaStream_t stream) {
  static_assert(kValueDim == kHeadDim);
  if (p.B == 0 || p.N == 0) return {};
  const Device device;
  if constexpr (BackwardConfig<kHeadDim>::kTile.shared_bytes(1) > kSharedBytesSmall) {
    if (device.blocks(BackwardConfig<kHeadDim>::kTile.shared_bytes(1)) == 0) {
      return backward_with<BackwardConfigSmall<kHeadDim>, Element>(p, device, stream);
    }
  }
  return backward_with<BackwardConfig<kHeadDim>, Element>(p, device, stream);
}

}  // namespace jax_flash2::cuda::sm80
