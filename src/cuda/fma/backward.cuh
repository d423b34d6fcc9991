// The backward pass in float32, by FMAs on every device from compute capability 8.0 up, deterministic by construction: no
// sum is made in memory. One kernel owns 64 queries of a head and walks the key tiles that they meet, for dQ; another
// owns 64 keys and walks the query tiles of all heads of its group, for dK and dV. Both are one body: `own` rows stay,
// `other` rows go by, and panels are own x other. Asks Mask, Score, Addend and Dropout, and never knows which feature it
// serves.
//
// dQ is first: it also writes delta = rowsum(dout * out) - dlse, which the keys' kernels read, and all gradients of operands,
// which belong to a query or a pair.
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

// delta and the sink's gradient of the queries [i0, i0 + 64); their lse and delta in shared memory, +inf and 0 for dead ones.
__device__ __forceinline__ void find_delta(const Problem& p, const Batch& b, int n, const Mask& mask, int i0,
                                           float* lse_s, float* delta_s) {
  const auto live = mask.live_queries();
#pragma unroll 2
  for (int row = threadIdx.x / 16; row < kSide; row += kThreads / 16) {
    const int i = i0 + row;
    const bool is_live = live.has(i);
    float sum = 0;
    if (is_live) {
      const float* const out_g = p.out.at<const float>(b, n) + i * p.out.row;
      const float* const dout_g = p.dout.at<const float>(b, n) + i * p.dout.row;
      for (int col = threadIdx.x % 16 * 4; col < p.Dv; col += kSide) {
        const float4 x = load4(out_g + col), y = load4(dout_g + col);
        sum = fmaf(x.x, y.x, fmaf(x.y, y.y, fmaf(x.z, y.z, fmaf(x.w, y.w, sum))));
      }
    }
    sum = row_sum(sum);
    if (threadIdx.x % 16 != 0) continue;
    lse_s[row] = is_live ? p.lse.at<const float>(b, n)[i * p.lse.row] : INFINITY;
    delta_s[row] = i < p.T ? write_delta(p, b, n, i, is_live, sum) : 0.0f;
  }
}

template <int kHeadDim, Makes kMakes>
__global__ void __launch_bounds__(kThreads, BackwardConfig<kHeadDim>::kBlocksPerSm)
    backward_kernel(const __grid_constant__ Problem p, const int tiles, const Body body) {
  using Config = BackwardConfig<kHeadDim>;
  constexpr bool kQueries = kMakes == Makes::kDq;  // the own rows are queries
  constexpr bool kScores = kMakes != Makes::kDv;   // dS is needed
  constexpr bool kValues = kMakes == Makes::kDv || kMakes == Makes::kDkDv;
  extern __shared__ __align__(1024) float shared[];
  float *const own_s = shared, *const other_s = own_s + Config::kSlots * kPanel;
  float *const p_s = other_s + Config::kSlots * kPanel, *const ds_s = p_s + kPanel;
  float *const lse_s = ds_s + kPanel, *const delta_s = lse_s + kSide, *const slopes_s = delta_s + kSide;
  Plan* const plan_s = reinterpret_cast<Plan*>(slopes_s + kSide);

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
  const Lane lane;

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
      const float* const query_g = of_v ? plan_s->dout_g + at_n * p.dout.head : plan_s->q_g + at_n * p.q.head;
      const Matrix of_query{query_g, row_q, cols}, of_key{of_v ? plan_s->v_g : plan_s->k_g, row_k, cols};
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
    *plan_s = {p.q.at<const float>(b),
               p.k.at<const float>(b, key_head()),
               p.v.at<const float>(b, key_head()),
               p.dout.at<const float>(b),
               p.lse.at<const float>(b),
               p.delta.at<const float>(b),
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
  float d_own[kScores ? Config::kPanels : 1][kRows][kCols] = {}, dv[kValues ? Config::kPanels : 1][kRows][kCols] = {};
  const auto query_at = [&](int other0, int r, int c) { return kQueries ? own0 + lane.row(r) : other0 + lane.col(c); };
  const auto key_at = [&](int other0, int r, int c) { return kQueries ? other0 + lane.col(c) : own0 + lane.row(r); };
  const auto statistic = [&](const float* of_s, int r, int c) { return of_s[kQueries ? lane.row(r) : lane.col(c)]; };
  const auto seen_by = [&](const Mask& mask, int r) -> Range {  // the other rows that own row r meets
    if constexpr (kQueries) return mask.keys(own0 + lane.row(r));
    return mask.queries(own0 + lane.row(r));
  };

#pragma unroll 1
  for (int n = n_begin; n < n_end; n++) {
#pragma unroll 1
    for (int tile = walk.begin; tile < walk.end; tile++) {
      const int other0 = tile * kSide;
      float brought = 0;  // by the first threads lse, by the others delta: memory answers while S is computed
      if constexpr (!kQueries) {
        const bool of_lse = threadIdx.x < kSide;
        const int i = other0 + int(threadIdx.x) % kSide;
        const float* const from_g = of_lse ? plan_s->lse_g + n * p.lse.head : plan_s->delta_g + n * p.delta.head;
        brought = live_q.has(i) ? from_g[i * (of_lse ? p.lse.row : p.delta.row)] : of_lse ? INFINITY : 0.0f;
      }

      float s[kRows][kCols] = {};
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
        lse_s[threadIdx.x] = brought;  // delta_s follows it; read last before the barriers of S
        __syncthreads();               // the statistics are there
      }

      if (plan_s->plain) {
        const bool full = plan_s->full_begin <= tile && tile < plan_s->full_end;
        const float scale = float(p.spec.scale);
#pragma unroll
        for (int r = 0; r < kRows; r++) {
#pragma unroll
          for (int c = 0; c < kCols; c++) s[r][c] = power(fmaf(s[r][c], scale, -statistic(lse_s, r, c)));
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
        const Pairs pairs = Pairs::make(p, b, n, p.mask(b));
        each_block([&](int r, int c) {
          const Range seen[] = {seen_by(pairs.mask, r), seen_by(pairs.mask, r + 1)};
          uint32_t kept = 0;
          if (pairs.dropout.present()) kept = pairs.dropout.kept(query_at(other0, r, c), key_at(other0, r, c));
#pragma unroll
          for (int e = 0; e < 4; e++) {
            const int r_e = r + e / 2, c_e = c + e % 2, at = lane.at(r_e, c_e);
            const int i = query_at(other0, r_e, c_e), j = key_at(other0, r_e, c_e);
            const float added = pairs.added(i, j, seen[e / 2].has(other0 + lane.col(c_e)));
            const float score = pairs.score.template apply<Math>(ds_s[at]);
            const bool visible = added != -INFINITY;
            float factor = 1;
            if (pairs.dropout.present()) {
              factor = kept >> (kQueries ? e : e % 2 * 2 + e / 2) & 1 ? pairs.dropout.scale : 0.0f;
            }
            body(Pair{.at = at,
                      .query = i,
                      .key = j,
                      .visible = visible,
                      .probability = visible ? power(score + added - statistic(lse_s, r_e, c_e)) : 0.0f,
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
          each_pair([&](const Pair& x, int) { p_s[x.at] = x.probability * x.factor; }, [](int) {});
        }
      }
      __syncwarp();  // P of this warp's rows is there; it is written again behind the barriers of the next tile

      float dp[kRows][kCols] = {};
#pragma unroll
      for (int x = 0; x < Config::kPanels; x++) {
        if (x >= v_panels) break;
        step<Config::kSlots>(
            slot,
            [&](int at) {
              const float* const other = other_s + at * kPanel;
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
              const float probability = p_s[lane.at(r, c)];
              // Not 0 times a NaN of a pair that is not seen.
              ds_s[lane.at(r, c)] = probability == 0 ? 0 : probability * (dp[r][c] - statistic(delta_s, r, c));
            }
          }
        } else {
          __syncwarp();  // this warp has done with P of its rows: dP takes its place
          store_elements(p_s, dp, lane);
          const ScoreGradients gradients = kQueries ? ScoreGradients::make(p, batch_row(), n) : ScoreGradients{};
          float slope[2] = {};
          each_pair(
              [&](const Pair& x, int row) {
                const float delta = delta_s[kQueries ? x.query - own0 : x.query - other0];
                const float ds = x.visible ? x.probability * (p_s[x.at] * x.factor - delta) : 0.0f;
                ds_s[x.at] = x.visible ? ds * x.d_score : 0.0f;
                if (kQueries && x.visible) {
                  gradients.add_bias(x.query, x.key, ds);
                  slope[row] -= ds * x.distance;
                }
              },
              [&](int r) {
                if constexpr (kQueries) {
                  if (!gradients.slopes_g) return;
#pragma unroll
                  for (int row = 0; row < 2; row++) {
                    const float share = row_sum(slope[row]);
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
  const auto store = [&](const Tensor& to, int h, int cols, const auto& from, float factor) {
    float* const to_g = to.at<float>(b, h);
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      const int row = own0 + lane.row(r);
      const bool is_live = live_own.has(row);
#pragma unroll
      for (int x = 0; x < Config::kPanels; x++) {
        const int col = x * kSide + lane.tx * 4;
        const float (&d)[kCols] = from[x][r];
        const float4 scaled = {d[0] * factor, d[1] * factor, d[2] * factor, d[3] * factor};
        if (row < rows && col < cols)
          *reinterpret_cast<float4*>(to_g + row * to.row + col) = is_live ? scaled : float4{};
      }
    }
  };
  if constexpr (kScores) store(kQueries ? p.dq : p.dk, own_head(), p.D, d_own, p.score<float>(b, 0).scale);
  if constexpr (kValues) store(p.dv, own_head(), p.Dv, dv, 1);

  if constexpr (kQueries) {
    const Tensor &slopes = p.grads.alibi_slopes, &scales = p.grads.scale;
    if (slopes.present()) {
#pragma unroll 1
      for (int r = 0; r < kRows; r++) {
        const int i = own0 + lane.row(r);
        if (lane.tx == 0 && i < p.T) slopes.at<float>(b, own_head())[i * slopes.row] = slopes_s[lane.row(r)];
      }
    }
    if (scales.present()) {
#pragma unroll
      for (int r = 0; r < kRows; r++) {
        const int i = own0 + lane.row(r);
        float share = 0;
#pragma unroll
        for (int x = 0; x < Config::kPanels; x++) {
          const int col = x * kSide + lane.tx * 4;
          if (live_own.has(i) && col < p.D) {
            const float4 q = load4(p.q.at<const float>(b, own_head()) + i * p.q.row + col);
            const float (&d)[kCols] = d_own[x][r];
            share = fmaf(q.x, d[0], fmaf(q.y, d[1], fmaf(q.z, d[2], fmaf(q.w, d[3], share))));
          }
        }
        share = row_sum(share);
        if (lane.tx == 0 && i < p.T) scales.at<float>(b, own_head())[i * scales.row] = share;
      }
    }
  }
}

template <int kHeadDim, Makes kMakes>
Status launch_backward(const Problem& p, cudaStream_t stream) {
  constexpr bool kQueries = kMakes == Makes::kDq;
  const int tiles = ((kQueries ? p.T : p.S) + kSide - 1) / kSide;
  const int64_t blocks = int64_t{p.B} * (kQueries ? p.N : p.K) * tiles;
  return launch_kernel(backward_kernel<kHeadDim, kMakes>, blocks, kThreads, BackwardConfig<kHeadDim>::kSharedBytes,
                       stream, p, tiles, p.body());
}

// The entry point that generated units instantiate: heads of up to kHeadDim columns, and as many of values.
template <class Element, int kHeadDim, int kValueDim>
Status backward(const Problem& p, cudaStream_t stream) {
  static_assert(std::is_same_v<Element, float> && kValueDim == kHeadDim);
  if (p.B == 0 || p.N == 0) return {};
  if (p.T > 0 && !p.delta.present()) return {"a float32 backward needs its delta workspace"};
  if (p.T > 0) {
    if (const Status s = clear_score_gradients(p, stream); !s.ok()) return s;
  }
  if (const Status s = launch_backward<kHeadDim, Makes::kDq>(p, stream); !s.ok()) return s;
  if constexpr (BackwardConfig<kHeadDim>::kKeysAtOnce) {
    return launch_backward<kHeadDim, Makes::kDkDv>(p, stream);
  } else {
    if (const Status s = launch_backward<kHeadDim, Makes::kDk>(p, stream); !s.ok()) return s;
    return launch_backward<kHeadDim, Makes::kDv>(p, stream);
  }
}

}  // namespace jax_flash2::cuda::fma
