// The backward pass: one task is a tile of keys of one key head. It sums their dK and dV over all queries of the head's
// group in its own scratch, and adds its share of dQ to memory when it is its turn: five products a score, no partial sum
// in memory, and the same bits whatever the number of threads. Knows no instruction set.
#pragma once
#include <algorithm>
#include <limits>
#include <memory>
#include <utility>

#include "cpu/alive.h"
#include "cpu/elementwise.h"
#include "cpu/forward.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"
#include "cpu/scratch.h"
#include "cpu/turns.h"

namespace jax_flash2::cpu {

template <class E>
class Backward {
  using Real = typename RealOf<E>::type;
  static constexpr Real kInfinity = std::numeric_limits<Real>::infinity();
  // All of these fix the order of summation, so they depend on nothing but the shapes.
  static constexpr int kQueries = 64;                  // of a query tile
  static constexpr int kKeys = 512;                    // of a task, at most: so many share a packed query tile
  static constexpr int kFewKeys = 64;                  // of a task, at least
  static constexpr int kTasks = 32;                    // wanted, so that one head keeps many threads busy
  static constexpr int64_t kTaskElements = 128 << 10;  // of k and v, at most
  static constexpr int kSub = 64;                      // keys whose scores exist at a time

 public:
  Backward(const Problem& p, const Ops<E>& ops) : p(p), ops(ops) {}

  Status run(Executor& executor) {
    const int64_t key_heads = int64_t{p.B} * p.K, heads = int64_t{p.B} * p.N;
    queries_ = static_cast<int>(round_up(clamp_(p.T, 1, kQueries), ops.lanes));
    query_tiles_ = (p.T + queries_ - 1) / queries_;
    keys_ = kKeys;
    const auto too_many = [&] {
      return key_heads * ((int64_t{p.S} + keys_ - 1) / keys_) < kTasks ||
             int64_t{keys_} * (int64_t{p.D} + p.Dv) > kTaskElements;
    };
    while (keys_ > kFewKeys && too_many()) keys_ /= 2;
    lds_ = stride(queries_), ldd_ = stride(p.D), lddv_ = stride(p.Dv);

    delta_ = allocate<Real>(heads * p.T);
    turns_.reset(new (std::nothrow) Turn[heads * query_tiles_]);
    if constexpr (sizeof(E) < sizeof(Real)) dq_ = allocate<Real>(heads * p.T * p.D);
    const int64_t tiles = (int64_t{p.S} + keys_ - 1) / keys_, count = key_heads * tiles;
    const double work = 5.0 * heads * p.T * p.S * (p.D + p.Dv) / 2;
    const int n_workers = workers(executor, count, work);
    const int64_t each = scratch(nullptr).size;
    const auto memory = allocate<Real>(each * n_workers);
    if (!memory || !delta_ || !turns_ || (sizeof(E) < sizeof(Real) && !dq_))
      return {"out of host memory for the tiles of the backward pass"};
    if (const Status s = alive_.find(p, executor); !s.ok()) return s;

    const int64_t prologues = heads * query_tiles_;
    parallel_for(executor, workers(executor, prologues, 1.0 * heads * p.T * p.Dv), prologues, [&](int64_t x, int) {
      const int64_t head = x / query_tiles_;
      prologue(p.batch(static_cast<int>(head / p.N)), head, static_cast<int>(x % query_tiles_) * queries_);
    });
    // Key tiles outermost: neighbours in time add to different heads and seldom wait for each other.
    parallel_for(executor, n_workers, count, [&](int64_t x, int worker) {
      task(x % key_heads, static_cast<int>(x / key_heads), scratch(memory.get() + worker * each));
    });
    if (p.grads.bias.present()) {
      const BiasRegions regions(p, queries_);
      parallel_for(executor, n_workers, regions.count(),
                   [&](int64_t x, int worker) { bias_gradient(regions, x, scratch(memory.get() + worker * each)); });
    }
    return {};
  }

 private:
  struct Scratch {
    Real *k, *v, *dk, *dv;  // [keys_][ldd_ | lddv_]
    Real *q, *dout;         // [queries_][ldd_ | lddv_], q scaled
    Real *q_t, *dout_t;     // [D | Dv, padded][lds_], q scaled
    Real *s, *dp;           // [kSub][lds_]
    Real *added, *factor;   // likewise
    Real* dq;               // [queries_][ldd_]
    Real *lse, *delta;      // [queries_]
    Real* slope;            // [queries_]: gradient of the ALiBi slope
    Real *begin, *end;      // [queries_]
    int64_t size;
  };

  // Rows start on a vector and, where the dim is a power of two, not all in the same cache set.
  int64_t stride(int cols) const { return padded(cols) + ops.lanes; }
  int padded(int n) const { return static_cast<int>(round_up(n, ops.lanes)); }

  Scratch scratch(Real* base) const {
    Carve<Real> carve(base);
    const int64_t keys = min_(p.S, keys_), sub = min_(p.S, kSub);
    Scratch s{.k = carve(keys * ldd_),
              .v = carve(keys * lddv_),
              .dk = carve(keys * ldd_),
              .dv = carve(keys * lddv_),
              .q = carve(queries_ * ldd_),
              .dout = carve(queries_ * lddv_),
              .q_t = carve(padded(p.D) * lds_),
              .dout_t = carve(padded(p.Dv) * lds_),
              .s = carve(sub * lds_),
              .dp = carve(sub * lds_),
              .added = carve(sub * lds_),
              .factor = carve(sub * lds_),
              .dq = carve(queries_ * ldd_),
              .lse = carve(queries_),
              .delta = carve(queries_),
              .slope = carve(queries_),
              .begin = carve(queries_),
              .end = carve(queries_),
              .size = 0};
    s.size = carve.used();
    return s;
  }

  // Where dQ / scale is summed: in dq itself, or beside it where that has too few bits. `head` counts batches and heads.
  View<Real> dq_sum(const Batch& b, int64_t head, int64_t i) const {
    if constexpr (sizeof(E) < sizeof(Real))
      return {dq_.get() + (head * p.T + i) * p.D, p.D, 1};
    else
      return view<E>(p.dq, b, static_cast<int>(head % p.N), i);
  }

  // delta = rowsum(dout * out) - dlse of live rows; the gradients of dead ones.
  void prologue(const Batch& b, int64_t head, int i0) const {
    const int n = static_cast<int>(head % p.N), i1 = min_(p.T, i0 + queries_);
    const Live live = p.mask(b).live_queries();
    const int q_len = p.mask(b).q_len;
    const int first = clamp_(live.begin, i0, i1), last = clamp_(live.end, first, i1);
    Real* delta = delta_.get() + head * p.T;
    ops.row_dots(view<const E>(p.dout, b, n, first), view<const E>(p.out, b, n, first), last - first, p.Dv,
                 delta + first);
    const Real* const lse = p.lse.template at<const Real>(b, n);
    const Real sink = p.template sink<Real>(b, n);
    for (int i = i0; i < i1; i++) {
      const bool live_row = first <= i && i < last && live.has(i);
      if (!live_row || !alive_.query(head, i)) delta[i] = 0;
      if (p.dlse.present() && lse[i * p.lse.row] != -kInfinity)
        delta[i] -= p.dlse.template at<const Real>(b, n)[i * p.dlse.row];
      if (p.grads.sinks.present()) {
        const bool none = i >= q_len || sink == -kInfinity;
        at_row<Real>(p.grads.sinks, b, n, i) = none ? 0 : -std::exp(sink - lse[i * p.lse.row]) * delta[i];
      }
      if (live_row) continue;
      const View<E> dq = view<E>(p.dq, b, n, i);
      for (int c = 0; c < p.D; c++) store(dq.data + c * dq.col, Real(0));
      if (p.grads.scale.present()) at_row<float>(p.grads.scale, b, n, i) = 0;
      if (p.grads.alibi_slopes.present()) at_row<Real>(p.grads.alibi_slopes, b, n, i) = 0;
    }
  }

  template <class T>
  static T& at_row(const Tensor& t, const Batch& b, int n, int64_t i) {
    return t.at<T>(b, n)[i * t.row];
  }

  // Keys [tile * keys_, ...) of a key head, counted over batches.
  void task(int64_t key_head, int tile, const Scratch& t) const {
    const int row = static_cast<int>(key_head / p.K), kv_head = static_cast<int>(key_head % p.K);
    const Batch b = p.batch(row);
    const Mask mask = p.mask(b);
    const Range live = mask.live_keys(), live_queries = mask.live_queries();
    const int tile0 = tile * keys_, tile1 = min_(p.S, tile0 + keys_);
    const int j0 = clamp_(live.begin, tile0, tile1), j1 = clamp_(live.end, j0, tile1);
    if (j0 < j1) {
      load_keys(b, key_head, kv_head, {j0, j1}, t);
      std::fill_n(t.dk, (j1 - j0) * ldd_, Real(0));
      std::fill_n(t.dv, (j1 - j0) * lddv_, Real(0));
      const Tiles tiles = mask.query_tiles(tile0, tile1, queries_);
      for (int n = kv_head * p.group(); n < (kv_head + 1) * p.group(); n++)
        // Backwards: under a causal mask the next task then starts where this one has passed already.
        for (int x = tiles.end - 1; x >= tiles.begin; x--) {
          const int first = max_(x * queries_, live_queries.begin), last = min_((x + 1) * queries_, live_queries.end);
          query_tile(mask, {b, n, int64_t{row} * p.N + n, x, first, last}, tile, {j0, j1}, t);
        }
      ops.unpack({t.dk, ldd_, 1}, j1 - j0, p.D, 1, view<E>(p.dk, b, kv_head, j0));
      ops.unpack({t.dv, lddv_, 1}, j1 - j0, p.Dv, 1, view<E>(p.dv, b, kv_head, j0));
    }
    zero(view<E>(p.dk, b, kv_head, tile0), j0 - tile0, p.D), zero(view<E>(p.dk, b, kv_head, j1), tile1 - j1, p.D);
    zero(view<E>(p.dv, b, kv_head, tile0), j0 - tile0, p.Dv), zero(view<E>(p.dv, b, kv_head, j1), tile1 - j1, p.Dv);
  }

  static void zero(View<E> to, int rows, int cols) {
    for (int r = 0; r < rows; r++)
      for (int c = 0; c < cols; c++) store(to.data + r * to.row + c * to.col, Real(0));
  }

  // The live queries [first, last) of query tile `index` of head n; `head` counts batches and heads.
  struct Rows {
    Batch b;
    int n;
    int64_t head;
    int index, first, last;
    int count() const { return last - first; }
  };

  // What a query tile gives to dK and dV of the packed `keys` of task `tile`, and they to its dQ.
  void query_tile(const Mask& mask, const Rows& rows, int tile, const Range& keys, const Scratch& t) const {
    load_queries(rows, t);
    const Tiles met = keys_of(mask, rows.first, rows.last - 1);
    const Range seen = {max_(keys.begin, met.begin), min_(keys.end, met.end)};
    for (int j0 = seen.begin, j1; j0 < seen.end; j0 = j1) {
      j1 = min_(j0 + kSub, seen.end);
      const bool full = met.full_begin <= j0 && j1 <= met.full_end;
      if (!full) j1 = min_(j0 + kSub / 2, seen.end);  // a smaller block that is masked in part wastes less
      if (const Block x = scores(mask, rows, full, {j0, j1}, keys.begin, t); x.m > 0) gradients(mask, rows, x, t);
    }
    add_dq(mask, rows, tile, t);
  }

  // The keys [j0, j0 + m), which lie in scratch from `packed` on, and the n queries from r0 on that see one of them.
  struct Block {
    int r0, n, j0, m, packed;
  };

  // From the first query that sees one of the keys `j` to the last.
  static Range queries_of(const Mask& mask, const Range& j) {
    if (!mask.query_spans) return {mask.queries(j.begin).begin, mask.queries(j.end - 1).end};
    const Tiles met = mask.query_tiles(j.begin, j.end, 1);  // the first and the last key may be dead
    return {met.begin, met.end};
  }

  // The probabilities of the keys `j`, in t.s, and the gradients of their scores, in t.dp; m is 0 where no pair is kept.
  Block scores(const Mask& mask, const Rows& rows, bool full, const Range& j, int first, const Scratch& t) const {
    // Queries r0 and on; r0 is a multiple of the lanes.
    const Range met = queries_of(mask, j);
    const int r0 = max_(0, met.begin - rows.first) / ops.lanes * ops.lanes;
    const int n = min_(rows.count(), met.end - rows.first) - r0, width = padded(n), m = j.end - j.begin;
    if (n <= 0) return {};
    for (int r = 0; r < width && !full; r++) {
      const Range seen = r < n ? mask.keys(rows.first + r0 + r) : Range{0, 0};
      t.begin[r] = static_cast<Real>(clamp_(seen.begin - j.begin, 0, m));
      t.end[r] = static_cast<Real>(clamp_(seen.end - j.begin, 0, m));
    }
    const auto addend = p.template addend<Real>(rows.b, rows.n, mask);
    const auto dropout = p.template dropout<Real>(rows.b, rows.n);
    const int i0 = rows.first + r0, packed = j.begin - first;
    if (p.has_addend(mask) && !fill_added(addend, {i0, i0 + n}, j, width, {t.added, lds_})) return {};
    if (dropout.present()) fill_factor(dropout, i0, width, j.begin, m, {t.factor, lds_});
    const Real *k = t.k + packed * ldd_, *v = t.v + packed * lddv_;
    ops.gemm({{m, width, p.D}, {k, ldd_, 1}, {t.q_t + r0, lds_}, {t.s, lds_}, /*add=*/false});
    ops.gemm({{m, width, p.Dv}, {v, lddv_, 1}, {t.dout_t + r0, lds_}, {t.dp, lds_}, /*add=*/false});
    ops.gradient({.s = {t.s, lds_},
                  .dp = {t.dp, lds_},
                  .keys = m,
                  .n = width,
                  .bounds = full ? Bounds<Real>{} : Bounds<Real>{t.begin, t.end},
                  .score = {Real(1), p.template score<Real>(rows.b, rows.n).softcap},
                  .elementwise = {p.has_addend(mask) ? t.added : nullptr, dropout.present() ? t.factor : nullptr},
                  .lse = t.lse + r0,
                  .delta = t.delta + r0});
    return {r0, n, j.begin, m, packed};
  }

  // What a block adds to all gradients but that of the bias.
  void gradients(const Mask& mask, const Rows& rows, const Block& block, const Scratch& t) const {
    const auto [r0, n, j0, m, packed] = block;
    const Real* k = t.k + packed * ldd_;
    Real *dk = t.dk + packed * ldd_, *dv = t.dv + packed * lddv_;
    if (p.grads.alibi_slopes.present()) {
      const auto addend = p.template addend<Real>(rows.b, rows.n, mask);
      for (int j = 0; j < m && addend.sloped; j++)
        for (int r = r0; r < r0 + n; r++)
          t.slope[r] -= t.added[j * lds_ + r - r0] * addend.distance(rows.first + r, j0 + j);
    }
    ops.gemm({{m, padded(p.Dv), n}, {t.s, lds_, 1}, {t.dout + r0 * lddv_, lddv_}, {dv, lddv_}, /*add=*/true});
    ops.gemm({{m, padded(p.D), n}, {t.dp, lds_, 1}, {t.q + r0 * ldd_, ldd_}, {dk, ldd_}, /*add=*/true});
    ops.gemm({{n, padded(p.D), m}, {t.dp, 1, lds_}, {k, ldd_}, {t.dq + r0 * ldd_, ldd_}, /*add=*/true});
  }

  // Packs k and v; `key_head` counts batches and heads.
  void load_keys(const Batch& b, int64_t key_head, int kv_head, const Range& j, const Scratch& t) const {
    ops.pack(view<const E>(p.k, b, kv_head, j.begin), j.end - j.begin, p.D, 1, {t.k, ldd_});
    ops.pack(view<const E>(p.v, b, kv_head, j.begin), j.end - j.begin, p.Dv, 1, {t.v, lddv_});
    alive_.clear_keys(key_head, j.begin, j.end, t.k, ldd_);
    alive_.clear_keys(key_head, j.begin, j.end, t.v, lddv_);
  }

  // Packs q * scale and dout both ways, zeros behind their last row, and starts their dQ.
  void load_queries(const Rows& rows, const Scratch& t) const {
    const int n = rows.count(), width = padded(n);
    const Real scale = p.template score<Real>(rows.b, rows.n).scale;
    ops.pack(view<const E>(p.q, rows.b, rows.n, rows.first), n, p.D, scale, {t.q, ldd_});
    ops.pack(view<const E>(p.dout, rows.b, rows.n, rows.first), n, p.Dv, 1, {t.dout, lddv_});
    alive_.clear_queries(rows.head, rows.first, rows.last, t.q, ldd_);
    alive_.clear_queries(rows.head, rows.first, rows.last, t.dout, lddv_);
    std::fill_n(t.q + n * ldd_, (width - n) * ldd_, Real(0));
    std::fill_n(t.dout + n * lddv_, (width - n) * lddv_, Real(0));
    ops.transpose({t.q, ldd_}, width, padded(p.D), {t.q_t, lds_});
    ops.transpose({t.dout, lddv_}, width, padded(p.Dv), {t.dout_t, lds_});
    const Real* lse = p.lse.template at<const Real>(rows.b, rows.n);
    for (int r = 0; r < width; r++) {
      const bool alive = r < n && alive_.query(rows.head, rows.first + r);
      const Real at = alive ? lse[(rows.first + r) * p.lse.row] : kInfinity;
      t.lse[r] = at == -kInfinity ? kInfinity : at;  // a row whose scores are all -inf
      t.delta[r] = r < n ? delta_[rows.head * p.T + rows.first + r] : Real(0);
    }
    std::fill_n(t.dq, n * ldd_, Real(0));
    std::fill_n(t.slope, n, Real(0));
  }

  // Adds the tile's dQ to memory after those of the tasks before; the last one scales and rounds the sum.
  void add_dq(const Mask& mask, const Rows& rows, int tile, const Scratch& t) const {
    const int n = rows.count();
    const int before = mask.key_tiles_before(tile, rows.index, queries_, keys_, /*descending=*/false);
    const View<Real> sum = dq_sum(rows.b, rows.head, rows.first);
    Turn& turn = turns_[rows.head * query_tiles_ + rows.index];
    turn.wait_for(before);
    ops.accumulate({t.dq, ldd_}, n, p.D, before != 0, sum);
    if (p.grads.alibi_slopes.present())
      for (int r = 0; r < n; r++) {
        Real& slot = at_row<Real>(p.grads.alibi_slopes, rows.b, rows.n, rows.first + r);
        slot = before != 0 ? slot + t.slope[r] : t.slope[r];
      }
    if (mask.key_tiles_before(tile, rows.index, queries_, keys_, /*descending=*/true) == 0) {
      if (p.grads.scale.present()) scale_gradient(rows, sum);
      const Real scale = p.template score<Real>(rows.b, rows.n).scale;
      ops.unpack({sum.data, sum.row, sum.col}, n, p.D, scale, view<E>(p.dq, rows.b, rows.n, rows.first));
      for (int r = 0; r < n; r++)  // not 0 times a NaN that other rows may read
        if (!alive_.query(rows.head, rows.first + r)) zero(view<E>(p.dq, rows.b, rows.n, rows.first + r), 1, p.D);
    }
    turn.pass();
  }

  void scale_gradient(const Rows& rows, const View<Real>& sum) const {
    for (int r = 0; r < rows.count(); r++) {
      const auto q = view<const E>(p.q, rows.b, rows.n, rows.first + r);
      Real dot = 0;
      const bool alive = alive_.query(rows.head, rows.first + r);
      for (int c = 0; c < p.D && alive; c++) dot += load(q.data[c * q.col]) * sum.data[r * sum.row + c * sum.col];
      p.grads.scale.template at<float>(rows.b, rows.n)[(rows.first + r) * p.grads.scale.row] = static_cast<float>(dot);
    }
  }

  // The elements of the bias's gradient in regions: each is summed by one task over all pairs that share it, in one order.
  struct BiasRegions {
    bool row, col, head;           // whether each query, key and head has elements of its own; else all share them
    bool batch[kMaxBatchAxes];     // ... each index of a batch axis
    int64_t own = 1, sharing = 1;  // batch rows that have elements of their own, and that share each of them
    int64_t heads, rows, cols;     // regions along each axis
    int64_t count() const { return own * heads * rows * cols; }

    BiasRegions(const Problem& p, int queries) {
      const Tensor& bias = p.grads.bias;
      row = bias.row || p.T == 1, col = bias.col || p.S == 1, head = bias.head || p.N == 1;
      for (int a = 0; a < kMaxBatchAxes; a++) {
        batch[a] = bias.batch[a] != 0;
        (batch[a] ? own : sharing) *= p.batch_sizes[a];
      }
      heads = head ? p.N : 1;
      rows = row ? (p.T + queries - 1) / queries : 1, cols = col ? (p.S + kSub - 1) / kSub : 1;
    }

    Batch at(const Problem& p, int64_t mine, int64_t other) const {
      Batch b;
      for (int a = kMaxBatchAxes; a-- > 0;) {
        int64_t& rest = batch[a] ? mine : other;
        b.at[a] = static_cast<int32_t>(rest % p.batch_sizes[a]), rest /= p.batch_sizes[a];
      }
      return b;
    }
  };

  // Computes the scores once more: no two tasks then add to one element, whatever shares it.
  void bias_gradient(const BiasRegions& regions, int64_t x, const Scratch& t) const {
    const auto next = [&](int64_t count) { return std::exchange(x, x / count) % count; };
    const auto col = static_cast<int>(next(regions.cols)), row = static_cast<int>(next(regions.rows));
    const auto head = static_cast<int>(next(regions.heads));
    const Range queries = regions.row ? Range{row * queries_, min_(p.T, (row + 1) * queries_)} : Range{0, p.T};
    const Range keys = regions.col ? Range{col * kSub, min_(p.S, (col + 1) * kSub)} : Range{0, p.S};
    const Tensor& slot = p.grads.bias;
    Real* const sum = slot.template at<Real>(regions.at(p, x, 0), head);
    for (int i = queries.begin; i < (regions.row ? queries.end : 1); i++)
      for (int j = keys.begin; j < (regions.col ? keys.end : 1); j++) sum[i * slot.row + j * slot.col] = 0;

    for (int64_t other = 0; other < regions.sharing; other++) {
      const Batch b = regions.at(p, x, other);
      int64_t batch_row = 0;
      for (int a = 0; a < kMaxBatchAxes; a++) batch_row = batch_row * p.batch_sizes[a] + b.at[a];
      const Mask mask = p.mask(b);
      for (int n = head; n < (regions.head ? head + 1 : p.N); n++)
        for (int j0 = keys.begin; j0 < keys.end; j0 += kSub)
          for (int i0 = queries.begin; i0 < queries.end; i0 += queries_) {
            const Range live = mask.live_queries();
            const int first = max_(i0, live.begin), last = min_(min_(i0 + queries_, queries.end), live.end);
            if (first < last)
              add_bias(mask, {b, n, batch_row * p.N + n, 0, first, last}, {j0, min_(j0 + kSub, keys.end)}, sum, t);
          }
    }
  }

  void add_bias(const Mask& mask, const Rows& rows, const Range& keys, Real* sum, const Scratch& t) const {
    const Tiles met = keys_of(mask, rows.first, rows.last - 1);
    const Range seen = {max_(keys.begin, met.begin), min_(keys.end, met.end)};
    if (seen.begin >= seen.end) return;
    load_queries(rows, t);
    load_keys(rows.b, rows.head / p.group(), rows.n / p.group(), seen, t);
    const bool full = met.full_begin <= seen.begin && seen.end <= met.full_end;
    const Block block = scores(mask, rows, full, seen, seen.begin, t);
    const Tensor& slot = p.grads.bias;
    for (int j = 0; j < block.m; j++)
      for (int r = 0; r < block.n; r++)
        sum[(rows.first + block.r0 + r) * slot.row + (block.j0 + j) * slot.col] += t.added[j * lds_ + r];
  }

  const Problem& p;
  const Ops<E>& ops;
  int queries_ = 0, query_tiles_ = 0, keys_ = 0;  // of a query tile; query tiles; keys of a task
  int64_t lds_ = 0, ldd_ = 0, lddv_ = 0;          // leading dimensions of scratch
  Buffer<Real> delta_;                            // [B, N, T]
  Buffer<Real> dq_;                               // [B, N, T, D], where E has fewer bits
  std::unique_ptr<Turn[]> turns_;                 // [B, N, query_tiles_]
  Alive<Real> alive_;
};

}  // namespace jax_flash2::cpu
