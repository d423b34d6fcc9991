// The forward pass: one task is a tile of query rows of one head. It walks the key tiles that the mask leaves it; in each
// it deals with `lanes` rows at a time, whose scores, probabilities and output stay in the first-level cache.
// Knows no instruction set.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/alive.h"
#include "cpu/elementwise.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "cpu/scratch.h"

namespace jax_flash2::cpu {

template <class E>
View<E> view(const Tensor& t, const Batch& b, int head, int64_t row) {
  return {t.at<E>(b, head) + row * t.row, t.row, t.col};
}

// Keys that one of the live queries [first, last] sees, and in the middle those that all of them do. What operands remove
// is another matter here: each pair of a block is asked about.
inline Tiles keys_of(Mask mask, int first, int last) {
  const Range of_first = mask.keys(first), of_last = mask.keys(last);
  if (!mask.key_spans) return {of_first.begin, of_last.begin, of_first.end, of_last.end};
  mask.exact = true;  // the first and the last may be dead
  return mask.key_tiles(first, last + 1, 1);
}

template <class E>
class Forward {
  using Real = typename RealOf<E>::type;
  static constexpr Real kInfinity = std::numeric_limits<Real>::infinity();
  static constexpr int kKeys = 128;  // of a tile: what fixes the order of summation, so it depends on nothing
  // Queries of a task share a packed key tile. So many that their rows of q and out fill half of a 512 KB cache.
  static constexpr int64_t kTaskBytes = 256 << 10;

 public:
  Forward(const Problem& p, const Ops<E>& ops) : p(p), ops(ops) {}

  Status run(Executor& executor) {
    if (int64_t{p.B} * p.N * p.T == 0) return {};
    const int64_t heads = int64_t{p.B} * p.N;
    d_ = static_cast<int>(round_up(p.D, ops.lanes)), dv_ = static_cast<int>(round_up(p.Dv, ops.lanes));
    const double work = 2.0 * heads * p.T * p.S * (p.D + p.Dv);
    const int64_t most = kTaskBytes / (static_cast<int64_t>(sizeof(Real)) * max_(1, d_ + dv_));
    rows_ = static_cast<int>(round_up(std::clamp<int64_t>(most, 1, p.T), ops.lanes));
    const auto tiles = [&] { return (int64_t{p.T} + rows_ - 1) / rows_; };
    while (rows_ >= 4 * ops.lanes && heads * tiles() < 4 * workers(executor, heads * p.T, work))
      rows_ = static_cast<int>(round_up(rows_ / 2, ops.lanes));
    const int64_t count = heads * tiles();
    const int n_workers = workers(executor, count, work);
    const int64_t each = scratch(nullptr).size;
    const auto memory = allocate<Real>(each * n_workers);
    if (!memory) return {"out of host memory for the tiles of the forward pass"};
    if (const Status s = alive_.find(p, executor); !s.ok()) return s;
    parallel_for(executor, n_workers, count, [&](int64_t x, int worker) {
      const int64_t head = x / tiles();
      const auto tile = static_cast<int>(tiles() - 1 - x % tiles());  // under a causal mask the longest first
      task(head, tile * rows_, scratch(memory.get() + worker * each));
    });
    return {};
  }

 private:
  struct Scratch {
    Real* q;               // [block][D, padded][lanes], scaled
    Real* rows;            // [lanes][D or Dv, padded]
    Real *k, *v;           // [kKeys][D or Dv, padded]
    Real* s;               // [kKeys][lanes]
    Real *added, *factor;  // likewise
    Real* out;             // [block][Dv, padded][lanes]
    Real *maximum, *sum;   // [block][lanes]
    Real *begin, *end;     // [lanes]
    int64_t size;
  };

  Scratch scratch(Real* base) const {
    Carve<Real> carve(base);
    const int64_t keys = min_(p.S, kKeys);
    Scratch s{.q = carve(int64_t{rows_} * d_),
              .rows = carve(int64_t{ops.lanes} * max_(d_, dv_)),
              .k = carve(keys * d_),
              .v = carve(keys * dv_),
              .s = carve(keys * ops.lanes),
              .added = carve(keys * ops.lanes),
              .factor = carve(keys * ops.lanes),
              .out = carve(int64_t{rows_} * dv_),
              .maximum = carve(rows_),
              .sum = carve(rows_),
              .begin = carve(ops.lanes),
              .end = carve(ops.lanes),
              .size = 0};
    s.size = carve.used();
    return s;
  }

  // `head` counts batches and heads.
  void task(int64_t head, int i0, const Scratch& t) const {
    const int row = static_cast<int>(head / p.N), n = static_cast<int>(head % p.N);
    const Batch b = p.batch(row);
    const Mask mask = p.mask(b);
    const Live live = mask.live_queries(), live_keys = mask.live_keys();
    const int L = ops.lanes, i1 = min_(p.T, i0 + rows_), kv_head = n / p.group();
    // Queries are packed and computed for the live rows of the task only; the others are never read.
    const auto score = p.template score<Real>(b, n);
    const Real row_sink = p.template sink<Real>(b, n);
    for (int i = i0; i < i1; i += L) {
      const int first = max_(i, live.begin), last = min_(min_(i + L, i1), live.end);
      if (last - first < L) std::fill_n(t.rows, L * d_, Real(0));
      if (first < last) {
        Real* const packed = t.rows + (first - i) * d_;
        ops.pack(view<const E>(p.q, b, n, first), last - first, p.D, score.scale, {packed, d_});
        alive_.clear_queries(head, first, last, packed, d_);
      }
      ops.transpose({t.rows, d_}, L, d_, {t.q + int64_t{i - i0} * d_, L});
    }
    std::fill_n(t.maximum, rows_, -kInfinity);
    std::fill_n(t.sum, rows_, Real(0));
    std::fill_n(t.out, int64_t{rows_} * dv_, Real(0));

    const Tiles tiles = mask.key_tiles(i0, i1, kKeys);
    for (int tile = tiles.begin; tile < tiles.end; tile++) {
      const Range keys = {max_(tile * kKeys, live_keys.begin), min_(min_(p.S, (tile + 1) * kKeys), live_keys.end)};
      ops.pack(view<const E>(p.k, b, kv_head, keys.begin), keys.end - keys.begin, p.D, 1, {t.k, d_});
      ops.pack(view<const E>(p.v, b, kv_head, keys.begin), keys.end - keys.begin, p.Dv, 1, {t.v, dv_});
      alive_.clear_keys(int64_t{row} * p.K + kv_head, keys.begin, keys.end, t.k, d_);
      alive_.clear_keys(int64_t{row} * p.K + kv_head, keys.begin, keys.end, t.v, dv_);
      for (int i = i0; i < i1; i += L) block(mask, b, n, i, min_(i + L, i1), i - i0, keys, t);
    }

    for (int i = i0; i < i1; i += L) {
      const int rows = min_(L, i1 - i), at = i - i0;
      Real* shrink = t.begin;
      for (int r = 0; r < rows; r++) {
        const Real sink = i + r < mask.q_len ? row_sink : -kInfinity;
        Real sum = t.sum[at + r], maximum = t.maximum[at + r], grow = 1;
        const bool dead = !live.has(i + r) || sum == 0;
        if (!dead && sink != -kInfinity) {
          const Real top = std::max(maximum, sink);
          grow = std::exp(maximum - top), maximum = top;
          sum = sum * grow + std::exp(sink - top);
        }
        shrink[r] = dead ? Real(0) : grow / sum;
        p.lse.template at<Real>(b, n)[(i + r) * p.lse.row] = dead ? sink : maximum + std::log(sum);
      }
      ops.transpose({t.out + int64_t{at} * dv_, L}, dv_, L, {t.rows, dv_});
      for (int r = 0; r < rows; r++) {
        // Not 0 times what the keys of the live rows beside it left there, which may be Inf or NaN.
        if (shrink[r] == 0) std::fill_n(t.rows + r * dv_, dv_, Real(0));
        ops.unpack({t.rows + r * dv_, dv_, 1}, 1, p.Dv, shrink[r], view<E>(p.out, b, n, i + r));
      }
    }
  }

  // The queries [i, i_end), at lane `at` of the task, and those of the packed `keys` that one of them sees.
  void block(const Mask& mask, const Batch& b, int n, int i, int i_end, int at, const Range& keys,
             const Scratch& t) const {
    const Range live = mask.live_queries();
    const int L = ops.lanes, first = max_(i, live.begin), last = min_(i_end, live.end) - 1;
    if (first > last) return;
    const Tiles met = keys_of(mask, first, last);
    const int j0 = max_(keys.begin, met.begin), j1 = min_(keys.end, met.end);
    if (j0 >= j1) return;
    // Lanes without a live query hold zeros and are dropped at the end: no mask is needed for them.
    const bool full = met.full_begin <= j0 && j1 <= met.full_end;
    for (int x = 0; x < L && !full; x++) {
      const Range seen = mask.keys(i + x);
      t.begin[x] = static_cast<Real>(clamp_(seen.begin - j0, 0, j1 - j0));
      t.end[x] = static_cast<Real>(clamp_(seen.end - j0, 0, j1 - j0));
    }
    const int m = j1 - j0, packed = j0 - keys.begin;
    const auto addend = p.template addend<Real>(b, n, mask);
    const auto dropout = p.template dropout<Real>(b, n);
    if (p.has_addend(mask) && !fill_added(addend, {i, i_end}, {j0, j1}, L, {t.added, L})) return;
    if (dropout.present()) fill_factor(dropout, i, L, j0, m, {t.factor, L});
    const Real *k = t.k + int64_t{packed} * d_, *v = t.v + int64_t{packed} * dv_, *q = t.q + int64_t{at} * d_;
    Real* out = t.out + int64_t{at} * dv_;
    ops.gemm({{m, L, p.D}, {k, d_, 1}, {q, L}, {t.s, L}, /*add=*/false});
    ops.softmax({.s = t.s,
                 .keys = m,
                 .bounds = full ? Bounds<Real>{} : Bounds<Real>{t.begin, t.end},
                 .score = {Real(1), p.template score<Real>(b, n).softcap},
                 .elementwise = {p.has_addend(mask) ? t.added : nullptr, dropout.present() ? t.factor : nullptr},
                 .maximum = t.maximum + at,
                 .sum = t.sum + at,
                 .o = out,
                 .o_rows = p.Dv});
    ops.gemm({{p.Dv, L, m}, {v, 1, dv_}, {t.s, L}, {out, L}, /*add=*/true});
  }

  const Problem& p;
  const Ops<E>& ops;
  int rows_ = 0;        // of a task, a multiple of the lanes
  int d_ = 0, dv_ = 0;  // D and Dv, padded to a multiple of the lanes
  Alive<Real> alive_;
};

}  // namespace jax_flash2::cpu
