// The backward pass in float32 and float64, by FMAs on every device from compute capability 8.0 up, deterministic by
// construction: no sum is made in memory. One kernel owns as many queries of a head as a panel has rows and walks the
// key tiles that they meet, for dQ; another owns as many keys and walks the query tiles of all heads of its group, for
// dK and dV. Both are one body: `own` rows stay, `other` rows go by, and panels are own x other. Asks Mask, Score, Addend
// and Dropout, and never knows which feature it serves.
//
// dQ is first: it also writes delta = rowsum(dout * out) - dlse, which the keys' kernels read, and all gradients of
// operands, which belong to a query or a pair.
#pragma once
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "core/problem.h"
#include "cuda/delta.cuh"
#include "cuda/fma/config.cuh"
#include "cuda/fma/pairs.cuh"
#include "cuda/fma/panel.cuh"
#include "cuda/launch_kernel.cuh"
#include "cuda/opaque.cuh"
#include "cuda/score_gradients.cuh"

namespace jax_flash2::cuda::fma {

// What a kernel makes.
enum class Makes { kDq, kDk, kDv, kDkDv };

// delta and the sink's gradient of a panel of queries from i0 on; their lse and delta in shared memory, +inf and 0 for
// dead ones.
template <class Real>
__device__ __forceinline__ void find_delta(const Problem& p, const Batch& b, int n, const Mask& mask, int i0,
                                           Real* lse_s, Real* delta_s) {
  constexpr int kSide = Panel<Real>::kSide, kChunk = Panel<Real>::kChunk;
  const auto live = mask.live_queries();
#pragma unroll 2
  for (int row = threadIdx.x / 16; row < kSide; row += kThreads / 16) {
    const int i = i0 + row;
    const bool is_live = live.has(i);
    Real sum = 0;
    if (is_live) {
      const Real* const out_g = p.out.at<const Real>(b, n) + i * p.out.row;
      const Real* const dout_g = p.dout.at<const Real>(b, n) + i * p.dout.row;
      for (int col = threadIdx.x % 16 * kChunk; col < p.Dv; col += kSide) {
        sum = add_dot(load_chunk(out_g + col), load_chunk(dout_g + col).x, sum);
      }
    }
    sum = row_sum(sum);
    if (threadIdx.x % 16 != 0) continue;
    lse_s[row] = is_live ? p.lse.at<const Real>(b, n)[i * p.lse.row] : Real(INFINITY);
    delta_s[row] = i < p.T ? write_delta(p, b, n, i, is_live, sum) : Real(0);
  }
}

template <class Real, int kHeadDim, Makes kMakes>
__global__ void __launch_bounds__(kThreads, BackwardConfig<Real, kHeadDim>::kBlocksPerSm)
    backward_kernel(const __grid_constant__ Problem p, const int tiles, const Body body) {
  using Config = BackwardConfig<Real, kHeadDim>;
  constexpr int kSide = Panel<Real>::kSide, kPanel = Panel<Real>::kSize, kChunk = Panel<Real>::kChunk;
  constexpr int kRows = Panel<Real>::kRows, kCols = Panel<Real>::kCols;
  constexpr bool kQueries = kMakes == Makes::kDq;  // the own rows are queries
  constexpr bool kScores = kMakes != Makes::kDv;   // dS is needed
  constexpr bool kValues = kMakes == Makes::kDv || kMakes == Makes::kDkDv;
  extern __shared__ __align__(1024) char shared[];
  Real *const own_s = reinterpret_cast<Real*>(shared), *const other_s = own_s + Config::kSlots * kPanel;
  Real *const p_s = other_s + Config::kSlots * kPanel, *const ds_s = p_s + kPanel;
  Real *const lse_s = ds_s + kPanel, *const delta_s = lse_s + kSide, *const slopes_s = delta_s + kSide;
  Plan<Real>* const plan_s = reinterpret_cast<Plan<Real>*>(slopes_s + kSide);

  const int head = blockIdx.x / tiles, own0 = blockIdx.x % tiles * kSide;  // head: batch row and head together
  // Asked for anew wherever they are used: registers are full.
  const auto batch_row = [&] { return p.batch(opaque(head) / (kQueries ? p.N : p.K)); };
  const auto own_head = [&] { return opaque(head) % (kQueries ? p.N : p.K); };
  const auto key_head = [&] { return kQueries ? own_head() / p.group() : own_head(); };
  const int n_begin = kQueries ? own_head() : own_head() * p.group();
  const int n_end = kQueries ? n_begin + 1 : n_begin + p.group();
  const Mask mask = p.mask(batch_row());
  const auto live_q = mask.live_queries();
  const auto live_k = mask.live_keys();
  const Tiles walk =
      kQueries ? mask.key_tiles(own0, min_(own0 + kSide, p.T), kSide) : mask.query_tiles(own0, own0 + kSide, kSide);
  const Lane<Real> lane;

  // The stream of panels: of each tile those of Q and K for S, of dO and V for dP (and of dO for dV), and once more those of
  // the other side of S, which dS multiplies.
  const int d_panels = (p.D + kSide - 1) / kSide, v_panels = (p.Dv + kSide - 1) / kSide;
  const int steps = d_panels + v_panels + (kScores ? d_panels : 0);
  int slot = 0;
  const auto load = [&](int n, int tile, int x) {
    return [&, n, tile, x](int to) {
      int at_n = n, at_tile = tile, panel = opaque(x);  // else addresses of all steps are worked out ahead, and spilt
      if (panel == steps) panel = 0, at_tile++;
      if (at_tile == walk.end) at_tile = walk.begin, at_n++;
      if (at_n == n_end) return;
      const bool of_v = d_panels <= panel && panel < d_panels + v_panels, again = panel >= d_panels + v_panels;
      const int col0 = (panel - (again ? d_panels + v_panels : of_v ? d_panels : 0)) * kSide;
      const int64_t row_q = of_v ? p.dout.row : p.q.row, row_k = of_v ? p.v.row : p.k.row;
      const int cols = of_v ? p.Dv : p.D;
      const Real* const query_g = of_v ? plan_s->dout_g + at_n * p.dout.head : plan_s->q_g + at_n * p.q.head;
      const Matrix<Real> of_query{query_g, row_q, cols}, of_key{of_v ? plan_s->v_g : plan_s->k_g, row_k, cols};
      if (!again && (kScores || !of_v)) {
        load_panel(own_s + to * kPanel, kQueries ? of_query : of_key, own0, col0, kQueries ? live_q : live_k);
      }
      load_panel(other_s + to * kPanel, kQueries ? of_key : of_query, at_tile * kSide, col0,
                 kQueries ? live_k : live_q);
      ptx::cp_async_commit_group();
    };
  };

  if (threadIdx.x == 0) {
    const Batch b = batch_row();
    *plan_s = {p.q.at<const Real>(b),
               p.k.at<const Real>(b, key_head()),
               p.v.at<const Real>(b, key_head()),
               p.dout.at<const Real>(b),
               p.lse.at<const Real>(b),
               p.delta.at<const Real>(b),
               walk.full_begin,
               walk.full_end,
               body != Body::kGeneral && mask.exact};
  }
  if constexpr (kQueries) {
    find_delta(p, batch_row(), n_begin, mask, own0, lse_s, delta_s);
    if (threadIdx.x < kSide) slopes_s[threadIdx.x] = 0;
  }
  __syncthreads();  // the plan is there, and of own queries the statistics
  if (walk.begin < walk.end) load(n_begin, walk.begin, 0)(slot);

  // d_own: dQ or dK before the scale.
  Elements<Real> d_own[kScores ? Config::kPanels : 1] = {}, dv[kValues ? Config::kPanels : 1] = {};
  const auto query_at = [&](int other0, int r, int c) { return kQueries ? own0 + lane.row(r) : other0 + lane.col(c); };
  const auto key_at = [&](int other0, int r, int c) { return kQueries ? other0 + lane.col(c) : own0 + lane.row(r); };
  const auto statistic = [&](const Real* of_s, int r, int c) { return of_s[kQueries ? lane.row(r) : lane.col(c)]; };
  const auto seen_by = [&](const Mask& mask, int r) -> Range {  // the other rows that own row r meets
    if constexpr (kQueries) return mask.keys(own0 + lane.row(r));
    return mask.queries(own0 + lane.row(r));
  };

#pragma unroll 1
  for (int n = n_begin; n < n_end; n++) {
#pragma unroll 1
    for (int tile = walk.begin; tile < walk.end; tile++) {
      const int other0 = tile * kSide;
      Real brought = 0;  // by the first threads lse, by the next delta: memory answers while S is computed
      if constexpr (!kQueries) {
        const bool of_lse = threadIdx.x < kSide;
        const int i = other0 + int(threadIdx.x) % kSide;
        const Real* const from_g = of_lse ? plan_s->lse_g + n * p.lse.head : plan_s->delta_g + n * p.delta.head;
        brought = live_q.has(i) ? from_g[i * (of_lse ? p.lse.row : p.delta.row)] : of_lse ? Real(INFINITY) : Real(0);
      }

      Elements<Real> s = {};
#pragma unroll 1
      for (int x = 0; x < d_panels; x++) {
        step<Config::kSlots>(
            slot,
            [&](int at) {
              multiply_abt(s, own_s + at * kPanel, other_s + at * kPanel, min_(kSide, p.D - x * kSide), lane);
            },
            load(n, tile, x + 1));
      }
      if constexpr (!kQueries) {
        if (threadIdx.x < 2 * kSide)
          lse_s[threadIdx.x] = brought;  // delta_s follows it; read last before the barriers of S
        __syncthreads();                 // the statistics are there
      }

      if (plan_s->plain) {
        const bool full = plan_s->full_begin <= tile && tile < plan_s->full_end;
        const Real scale = Real(p.spec.scale);
#pragma unroll
        for (int r = 0; r < kRows; r++) {
#pragma unroll
          for (int c = 0; c < kCols; c++) s[r][c] = power(std::fma(s[r][c], scale, -statistic(lse_s, r, c)));
        }
        if (!full) {
          const Mask anew = p.mask(batch_row());
#pragma unroll
          for (int r = 0; r < kRows; r++) {
            const Range seen = seen_by(anew, r);
#pragma unroll
            for (int c = 0; c < kCols; c++) {
              if (!seen.has(other0 + lane.col(c))) s[r][c] = 0;
            }
          }
        }
        store_elements(p_s, s, lane);
      } else {
        store_elements(ds_s, s, lane);  // the products, until dS takes their place
      }

      // What operands make of this thread's pairs, by blocks of two rows and two columns: body(pair, which row).
      const auto each_pair = [&](const auto& body, const auto& end_of_block) {
        const Batch b = batch_row();
        const Pairs pairs = Pairs<Real>::make(p, b, n, p.mask(b));
        each_block<Real>([&](int r, int c) {
          const Range seen[] = {seen_by(pairs.mask, r), seen_by(pairs.mask, r + 1)};
          uint32_t kept = 0;
          if (pairs.dropout.present()) kept = pairs.dropout.kept(query_at(other0, r, c), key_at(other0, r, c));
#pragma unroll
          for (int e = 0; e < 4; e++) {
            const int r_e = r + e / 2, c_e = c + e % 2, at = lane.at(r_e, c_e);
            const int i = query_at(other0, r_e, c_e), j = key_at(other0, r_e, c_e);
            const Real added = pairs.added(i, j, seen[e / 2].has(other0 + lane.col(c_e)));
            const Real score = pairs.score.template apply<Math>(ds_s[at]);
            const bool visible = added != -INFINITY;
            Real factor = 1;
            if (pairs.dropout.present()) {
              factor = kept >> (kQueries ? e : e % 2 * 2 + e / 2) & 1 ? pairs.dropout.scale : Real(0);
            }
            body(Pair<Real>{.at = at,
                            .query = i,
                            .key = j,
                            .visible = visible,
                            .probability = visible ? power(score + added - statistic(lse_s, r_e, c_e)) : Real(0),
                            .factor = factor,
                            .d_score = pairs.score.slope(score),
                            .distance = pairs.addend.distance(i, j)},
                 e / 2);
          }
          end_of_block(r);
        });
      };
      if constexpr (kValues) {
        if (!plan_s->plain) {
          each_pair([&](const Pair<Real>& x, int) { p_s[x.at] = x.probability * x.factor; }, [](int) {});
        }
      }
      __syncwarp();  // P of this warp's rows is there; it is written again behind the barriers of the next tile

      Elements<Real> dp = {};
#pragma unroll
      for (int x = 0; x < Config::kPanels; x++) {
        if (x >= v_panels) break;
        step<Config::kSlots>(
            slot,
            [&](int at) {
              const Real* const other = other_s + at * kPanel;
              if constexpr (kScores) multiply_abt(dp, own_s + at * kPanel, other, min_(kSide, p.Dv - x * kSide), lane);
              if constexpr (kValues) multiply_ab(dv[x], p_s, other, lane);
            },
            load(n, tile, d_panels + x + 1));
      }
      if constexpr (kScores) {
        if (plan_s->plain) {
#pragma unroll
          for (int r = 0; r < kRows; r++) {
#pragma unroll
            for (int c = 0; c < kCols; c++) {
              const Real probability = p_s[lane.at(r, c)];
              // Not 0 times a NaN of a pair that is not seen.
              ds_s[lane.at(r, c)] = probability == 0 ? 0 : probability * (dp[r][c] - statistic(delta_s, r, c));
            }
          }
        } else {
          __syncwarp();  // this warp has done with P of its rows: dP takes its place
          store_elements(p_s, dp, lane);
          const auto bias = kQueries ? BiasGradient<Real>::make(p, batch_row(), n) : BiasGradient<Real>{};
          Real slope[2] = {};
          each_pair(
              [&](const Pair<Real>& x, int row) {
                const Real delta = delta_s[kQueries ? x.query - own0 : x.query - other0];
                const Real ds = x.visible ? x.probability * (p_s[x.at] * x.factor - delta) : Real(0);
                ds_s[x.at] = x.visible ? ds * x.d_score : Real(0);
                if (kQueries && x.visible) {
                  bias.add(x.query, x.key, ds);
                  slope[row] -= ds * x.distance;
                }
              },
              [&](int r) {
                if constexpr (kQueries) {
                  if (!p.grads.alibi_slopes.present()) return;
#pragma unroll
                  for (int row = 0; row < 2; row++) {
                    const Real share = row_sum(slope[row]);
                    if (lane.tx == 0) slopes_s[lane.row(r + row)] += share;  // of no other thread
                    slope[row] = 0;
                  }
                }
              });
        }
        __syncwarp();  // dS of this warp's rows is there; it is written again behind the barriers of the next tile

#pragma unroll
        for (int x = 0; x < Config::kPanels; x++) {
          if (x >= d_panels) break;
          step<Config::kSlots>(
              slot, [&](int at) { multiply_ab(d_own[x], ds_s, other_s + at * kPanel, lane); },
              load(n, tile, d_panels + v_panels + x + 1));
        }
      }
    }
  }

  const Batch b = batch_row();
  const auto live_own = [&] {
    if constexpr (kQueries) return p.mask(b).live_queries();
    return p.mask(b).live_keys();
  }();
  // Rows of zeros where nobody looks: not even 0 times a NaN.
  const int rows = kQueries ? p.T : p.S;
  const auto store = [&](const Tensor& to, int h, int cols, const auto& from, Real factor) {
    Real* const to_g = to.at<Real>(b, h);
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      const int row = own0 + lane.row(r);
      const bool is_live = live_own.has(row);
#pragma unroll
      for (int x = 0; x < Config::kPanels; x++) {
        const int col = x * kSide + lane.tx * kChunk;
        Chunk<Real> scaled;
#pragma unroll
        for (int c = 0; c < kCols; c++) scaled.x[c] = from[x][r][c] * factor;
        if (row < rows && col < cols) store_chunk(to_g + row * to.row + col, is_live ? scaled : Chunk<Real>{});
      }
    }
  };
  if constexpr (kScores) store(kQueries ? p.dq : p.dk, own_head(), p.D, d_own, p.score<Real>(b, 0).scale);
  if constexpr (kValues) store(p.dv, own_head(), p.Dv, dv, 1);

  if constexpr (kQueries) {
    const Tensor &slopes = p.grads.alibi_slopes, &scales = p.grads.scale;
    if (slopes.present()) {
#pragma unroll 1
      for (int r = 0; r < kRows; r++) {
        const int i = own0 + lane.row(r);
        if (lane.tx == 0 && i < p.T) slopes.at<Real>(b, own_head())[i * slopes.row] = slopes_s[lane.row(r)];
      }
    }
    if (scales.present()) {
#pragma unroll
      for (int r = 0; r < kRows; r++) {
        const int i = own0 + lane.row(r);
        Real share = 0;
#pragma unroll
        for (int x = 0; x < Config::kPanels; x++) {
          const int col = x * kSide + lane.tx * kChunk;
          if (live_own.has(i) && col < p.D) {
            const Chunk<Real> q = load_chunk(p.q.at<const Real>(b, own_head()) + i * p.q.row + col);
            share = add_dot(q, d_own[x][r], share);
          }
        }
        share = row_sum(share);
        if (lane.tx == 0 && i < p.T) scales.at<float>(b, own_head())[i * scales.row] = float(share);
      }
    }
  }
}

template <class Real, int kHeadDim, Makes kMakes>
Status launch_backward(const Problem& p, cudaStream_t stream) {
  constexpr bool kQueries = kMakes == Makes::kDq;
  constexpr int kSide = Panel<Real>::kSide;
  const int tiles = ((kQueries ? p.T : p.S) + kSide - 1) / kSide;
  const int64_t blocks = int64_t{p.B} * (kQueries ? p.N : p.K) * tiles;
  return launch_kernel(backward_kernel<Real, kHeadDim, kMakes>, blocks, kThreads,
                       BackwardConfig<Real, kHeadDim>::kSharedBytes, stream, p, tiles, p.body());
}

// The entry point that generated units instantiate: heads of up to kHeadDim columns, and as many of values.
template <class Element, int kHeadDim, int kValueDim>
Status backward(const Problem& p, cudaStream_t stream) {
  static_assert(std::is_floating_point_v<Element> && kValueDim == kHeadDim);
  if (p.B == 0 || p.N == 0) return {};
  if (p.T > 0 && !p.delta.present()) return {"a backward by FMAs needs its delta workspace"};
  if (p.T > 0) {
    if (const Status s = clear_score_gradients(p, stream); !s.ok()) return s;
  }
  if (const Status s = launch_backward<Element, kHeadDim, Makes::kDq>(p, stream); !s.ok()) return s;
  if constexpr (BackwardConfig<Element, kHeadDim>::kKeysAtOnce) {
    return launch_backward<Element, kHeadDim, Makes::kDkDv>(p, stream);
  } else {
    if (const Status s = launch_backward<Element, kHeadDim, Makes::kDk>(p, stream); !s.ok()) return s;
    return launch_backward<Element, kHeadDim, Makes::kDv>(p, stream);
  }
}

}  // namespace jax_flash2::cuda::fma
