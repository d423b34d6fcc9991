// The backward pass: one task is a tile of keys of one key head. It sums their dK and dV over all queries of the head's
// group in its own scratch, and adds its share of dQ to memory when it is its turn: five products a score, no partial sum
// in memory, and the same bits whatever the number of threads. Knows no instruction set.
#pragma once
#include <algorithm>
#include <limits>
#include <memory>

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
  static constexpr int kQueries = 64;   // of a query tile
  static constexpr int kKeys = 256;     // of a task, at most: so many share a packed query tile
  static constexpr int kFewKeys = 64;   // of a task, at least
  static constexpr int kTasks = 64;     // wanted, so that one head keeps many threads busy
  static constexpr int kSub = 64;       // keys whose scores exist at a time

 public:
  Backward(const Problem& p, const Ops<E>& ops) : p(p), ops(ops) {}

  Status run(Executor& executor) {
    const int64_t key_heads = int64_t{p.B} * p.K, heads = int64_t{p.B} * p.N;
    queries_ = static_cast<int>(round_up(clamp_(p.T, 1, kQueries), ops.lanes));
    query_tiles_ = (p.T + queries_ - 1) / queries_;
    keys_ = kKeys;
    while (keys_ > kFewKeys && key_heads * ((int64_t{p.S} + keys_ - 1) / keys_) < kTasks) keys_ /= 2;
    lds_ = queries_ + ops.lanes, ldd_ = padded(p.D), lddv_ = padded(p.Dv);

    delta_ = allocate<Real>(heads * p.T);
    turns_.reset(new (std::nothrow) Turn[heads * query_tiles_]);
    if constexpr (sizeof(E) < sizeof(Real)) dq_ = allocate<Real>(heads * p.T * p.D);
    const int64_t tiles = (int64_t{p.S} + keys_ - 1) / keys_, count = key_heads * tiles;
    const int n_workers = workers(executor, count);
    const int64_t each = scratch(nullptr).size;
    const auto memory = allocate<Real>(each * n_workers);
    if (!memory || !delta_ || !turns_ || (sizeof(E) < sizeof(Real) && !dq_))
      return {"out of host memory for the tiles of the backward pass"};

    const int64_t prologues = heads * query_tiles_;
    parallel_for(executor, workers(executor, prologues / 16), prologues, [&](int64_t x, int) {
      const int64_t head = x / query_tiles_;
      prologue(p.batch(static_cast<int>(head / p.N)), head, static_cast<int>(x % query_tiles_) * queries_);
    });
    // Key tiles outermost: neighbours in time add to different heads and seldom wait for each other.
    parallel_for(executor, n_workers, count, [&](int64_t x, int worker) {
      task(static_cast<int>(x % key_heads), static_cast<int>(x / key_heads), scratch(memory.get() + worker * each));
    });
    return {};
  }

 private:
  struct Scratch {
    Real *k, *v, *dk, *dv;        // [keys_][ldd_ | lddv_]
    Real *q, *dout;               // [queries_][ldd_ | lddv_], q scaled
    Real *q_t, *dout_t;           // [D | Dv][lds_], q scaled
    Real *s, *dp;                 // [kSub][lds_]
    Real *dq;                     // [queries_][ldd_]
    Real *lse, *delta;            // [queries_]
    Real *begin, *end;            // [queries_]
    int64_t size;
  };

  // Rows start on a vector and, where the dim is a power of two, not all in the same cache set.
  int64_t padded(int cols) const { return round_up(cols, ops.lanes) + ops.lanes; }

  Scratch scratch(Real* base) const {
    Carve<Real> carve(base);
    const int64_t keys = min_(p.S, keys_), sub = min_(p.S, kSub);
    Scratch s{.k = carve(keys * ldd_), .v = carve(keys * lddv_), .dk = carve(keys * ldd_), .dv = carve(keys * lddv_),
              .q = carve(queries_ * ldd_), .dout = carve(queries_ * lddv_),
              .q_t = carve(p.D * lds_), .dout_t = carve(p.Dv * lds_),
              .s = carve(sub * lds_), .dp = carve(sub * lds_),
              .dq = carve(queries_ * ldd_),
              .lse = carve(queries_), .delta = carve(queries_), .begin = carve(queries_), .end = carve(queries_),
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
    const Range live = p.mask(b).live_queries();
    const int first = clamp_(live.begin, i0, i1), last = clamp_(live.end, first, i1);
    Real* delta = delta_.get() + head * p.T;
    ops.row_dots(view<const E>(p.dout, b, n, first), view<const E>(p.out, b, n, first), last - first, p.Dv,
                 delta + first);
    if (p.dlse.present())
      for (int i = first; i < last; i++) delta[i] -= p.dlse.template at<const Real>(b, n)[i * p.dlse.row];
    for (int i = i0; i < i1; i++) {
      if (first <= i && i < last) continue;
      const View<E> dq = view<E>(p.dq, b, n, i);
      for (int c = 0; c < p.D; c++) store(dq.data + c * dq.col, Real(0));
      if (p.grads.scale.present()) p.grads.scale.template at<float>(b, n)[i * p.grads.scale.row] = 0;
    }
  }

  void task(int key_head, int tile, const Scratch& t) const {
    const Batch b = p.batch(key_head / p.K);
    const int kv_head = key_head % p.K, tile0 = tile * keys_, tile1 = min_(p.S, tile0 + keys_);
    const Mask mask = p.mask(b);
    const Range live = mask.live_keys();
    const int j0 = clamp_(live.begin, tile0, tile1), j1 = clamp_(live.end, j0, tile1);
    if (j0 < j1) {
      ops.pack(view<const E>(p.k, b, kv_head, j0), j1 - j0, p.D, 1, t.k, ldd_);
      ops.pack(view<const E>(p.v, b, kv_head, j0), j1 - j0, p.Dv, 1, t.v, lddv_);
      std::fill_n(t.dk, (j1 - j0) * ldd_, Real(0));
      std::fill_n(t.dv, (j1 - j0) * lddv_, Real(0));
      const Tiles tiles = mask.query_tiles(tile0, tile1, queries_);
      for (int g = 0; g < p.group(); g++)
        // Backwards: under a causal mask the next task then starts where this one has passed already.
        for (int x = tiles.end - 1; x >= tiles.begin; x--)
          query_tile(mask, b, kv_head * p.group() + g, x, tile, {j0, j1}, t);
      ops.unpack(t.dk, ldd_, j1 - j0, p.D, 1, view<E>(p.dk, b, kv_head, j0));
      ops.unpack(t.dv, lddv_, j1 - j0, p.Dv, 1, view<E>(p.dv, b, kv_head, j0));
    }
    zero(view<E>(p.dk, b, kv_head, tile0), j0 - tile0, p.D), zero(view<E>(p.dk, b, kv_head, j1), tile1 - j1, p.D);
    zero(view<E>(p.dv, b, kv_head, tile0), j0 - tile0, p.Dv), zero(view<E>(p.dv, b, kv_head, j1), tile1 - j1, p.Dv);
  }

  static void zero(View<E> to, int rows, int cols) {
    for (int r = 0; r < rows; r++)
      for (int c = 0; c < cols; c++) store(to.data + r * to.row + c * to.col, Real(0));
  }

  // Query head n, query tile `x`: what it gives to dK and dV of the packed `keys`, and they to its dQ.
  void query_tile(const Mask& mask, const Batch& b, int n, int x, int tile, const Range& keys, const Scratch& t) const {
    const int64_t head = static_cast<int64_t>(row_of(b)) * p.N + n;
    const auto score = p.template score<Real>(b, n);
    const Range live = mask.live_queries();
    const int i0 = x * queries_, i1 = min_(p.T, i0 + queries_);
    const int first = max_(i0, live.begin), last = min_(i1, live.end), rows = last - first;
    const int width = static_cast<int>(round_up(rows, ops.lanes));
    load_queries(b, n, head, first, rows, width, score.scale, t);

    bool fresh = true;  // dq holds nothing yet
    const Range seen = {mask.keys(first).begin, mask.keys(last - 1).end};
    for (int from = keys.begin; from < keys.end; from += kSub) {
      const int j0 = max_(from, seen.begin), j1 = min_(min_(from + kSub, keys.end), seen.end);
      if (j0 >= j1) continue;
      const bool full = mask.keys(last - 1).begin <= j0 && j1 <= mask.keys(first).end;
      for (int r = 0; r < width && !full; r++) {
        const Range row = r < rows ? mask.keys(first + r) : Range{0, 0};
        t.begin[r] = static_cast<Real>(clamp_(row.begin - j0, 0, j1 - j0));
        t.end[r] = static_cast<Real>(clamp_(row.end - j0, 0, j1 - j0));
      }
      const int64_t at = j0 - keys.begin, m = j1 - j0;
      const int m32 = static_cast<int>(m);
      const Real *k = t.k + at * ldd_, *v = t.v + at * lddv_;
      ops.gemm({.m = m32, .n = width, .k = p.D, .a = k, .a_row = ldd_, .a_col = 1,
                .b = t.q_t, .ldb = lds_, .c = t.s, .ldc = lds_, .add = false});
      ops.gemm({.m = m32, .n = width, .k = p.Dv, .a = v, .a_row = lddv_, .a_col = 1,
                .b = t.dout_t, .ldb = lds_, .c = t.dp, .ldc = lds_, .add = false});
      ops.gradient({.s = t.s, .dp = t.dp, .keys = m32, .n = width, .ld = lds_,
                    .bounds = full ? Bounds<Real>{} : Bounds<Real>{t.begin, t.end},
                    .score = {Real(1), score.softcap}, .keep = p.keep(b, n), .dscore = p.dscore(b, n),
                    .i0 = first, .j0 = j0, .lse = t.lse, .delta = t.delta});
      ops.gemm({.m = m32, .n = width_of(p.Dv), .k = rows, .a = t.s, .a_row = lds_, .a_col = 1,
                .b = t.dout, .ldb = lddv_, .c = t.dv + at * lddv_, .ldc = lddv_, .add = true});
      ops.gemm({.m = m32, .n = width_of(p.D), .k = rows, .a = t.dp, .a_row = lds_, .a_col = 1,
                .b = t.q, .ldb = ldd_, .c = t.dk + at * ldd_, .ldc = ldd_, .add = true});
      ops.gemm({.m = rows, .n = width_of(p.D), .k = m32, .a = t.dp, .a_row = 1, .a_col = lds_,
                .b = k, .ldb = ldd_, .c = t.dq, .ldc = ldd_, .add = !fresh});
      fresh = false;
    }
    add_dq(mask, b, n, head, x, tile, first, rows, score.scale, t);
  }

  int width_of(int cols) const { return static_cast<int>(round_up(cols, ops.lanes)); }

  int64_t row_of(const Batch& b) const {
    int64_t row = 0;
    for (int a = 0; a < kMaxBatchAxes; a++) row = row * p.batch_sizes[a] + b.at[a];
    return row;
  }

  void load_queries(const Batch& b, int n, int64_t head, int first, int rows, int width, Real scale,
                    const Scratch& t) const {
    const auto q = view<const E>(p.q, b, n, first), dout = view<const E>(p.dout, b, n, first);
    ops.pack(q, rows, p.D, scale, t.q, ldd_);
    ops.pack(dout, rows, p.Dv, 1, t.dout, lddv_);
    ops.pack_transposed(q, rows, p.D, scale, t.q_t, lds_);
    ops.pack_transposed(dout, rows, p.Dv, 1, t.dout_t, lds_);
    for (int c = 0; c < p.D; c++) std::fill(t.q_t + c * lds_ + rows, t.q_t + c * lds_ + width, Real(0));
    for (int c = 0; c < p.Dv; c++) std::fill(t.dout_t + c * lds_ + rows, t.dout_t + c * lds_ + width, Real(0));
    for (int r = 0; r < width; r++) {
      const Real lse = r < rows ? p.lse.template at<const Real>(b, n)[(first + r) * p.lse.row] : kInfinity;
      t.lse[r] = lse == -kInfinity ? kInfinity : lse;  // every score of the row was -inf
      t.delta[r] = r < rows ? delta_[head * p.T + first + r] : Real(0);
    }
  }

  void add_dq(const Mask& mask, const Batch& b, int n, int64_t head, int x, int tile, int first, int rows, Real scale,
              const Scratch& t) const {
    const Tiles turns = mask.key_tiles(x * queries_, min_(p.T, (x + 1) * queries_), keys_);
    Turn& turn = turns_[head * query_tiles_ + x];
    turn.wait_for(tile - turns.begin);
    const View<Real> sum = dq_sum(b, head, first);
    for (int r = 0; r < rows; r++) {
      Real *to = sum.data + r * sum.row, *from = t.dq + r * ldd_;
      if (tile == turns.begin)
        for (int c = 0; c < p.D; c++) to[c * sum.col] = from[c];
      else
        for (int c = 0; c < p.D; c++) to[c * sum.col] += from[c];
    }
    if (tile + 1 == turns.end) finish_dq(b, n, sum, first, rows, scale);
    turn.pass();
  }

  void finish_dq(const Batch& b, int n, const View<Real>& sum, int first, int rows, Real scale) const {
    const auto q = view<const E>(p.q, b, n, first);
    const auto dq = view<E>(p.dq, b, n, first);
    for (int r = 0; r < rows; r++) {
      const Real* from = sum.data + r * sum.row;
      if (p.grads.scale.present()) {
        Real dot = 0;
        for (int c = 0; c < p.D; c++) dot += load(q.data[r * q.row + c * q.col]) * from[c * sum.col];
        p.grads.scale.template at<float>(b, n)[(first + r) * p.grads.scale.row] = static_cast<float>(dot);
      }
      for (int c = 0; c < p.D; c++) store(dq.data + r * dq.row + c * dq.col, from[c * sum.col] * scale);
    }
  }

  const Problem& p;
  const Ops<E>& ops;
  int queries_ = 0, query_tiles_ = 0, keys_ = 0;  // of a query tile; query tiles; keys of a task
  int64_t lds_ = 0, ldd_ = 0, lddv_ = 0;          // leading dimensions of scratch
  Buffer<Real> delta_;                            // [B, N, T]
  Buffer<Real> dq_;                               // [B, N, T, D], where E has fewer bits
  std::unique_ptr<Turn[]> turns_;                 // [B, N, query_tiles_]
};

}  // namespace jax_flash2::cpu
