// The table of ops.h for the instruction set that the including file is compiled for.
// Knows tiles and lanes, no batch, head or thread. Internal linkage throughout, for the reason given in element.h.
#include "cpu/gemm.h"
#include "cpu/ops.h"
#include "cpu/simd.h"

namespace jax_flash2::cpu {
namespace {

// Which lanes keep key `row` of the tile.
template <class Real, bool kMasked>
struct Visible {
  Vec<Real> begin, end;
  Visible(const Bounds<Real>& bounds, int lane) {
    if constexpr (kMasked) begin = get(bounds.begin + lane), end = get(bounds.end + lane);
  }
  Vec<Real> select(int row, Vec<Real> kept, Real dropped) const {
    if constexpr (!kMasked) return kept;
    const Vec<Real> x = splat(Real(row));
    return ((x >= begin) & (x < end)) ? kept : splat(dropped);
  }
};

// Where the plain tile has nothing to do: a score that has no cap is the product itself, for the scale went into the packed
// queries, and nothing is added to it.
template <class Real>
inline bool is_general(const Score<Real>& score, const Elementwise<Real>& e) {
  return score.softcap != 0 || e.added || e.factor;
}

template <class Real, bool kMasked, bool kGeneral>
void softmax_tile(const Softmax<Real>& t) {
  constexpr int W = kWidth<Real>, L = kLanes<Real>;
  const Elementwise<Real> e = kGeneral ? t.elementwise : Elementwise<Real>{};
  for (int x = 0; x < L; x += W) {
    const Visible<Real, kMasked> visible(t.bounds, x);
    const Vec<Real> before = get(t.maximum + x);
    Vec<Real> m = before;
    for (int j = 0; j < t.keys; j++) {
      Real* at = t.s + j * L + x;
      Vec<Real> s = get(at);
      if constexpr (kGeneral) s = t.score.template apply<Math<Real>>(s);
      if (e.added) {
        const Vec<Real> added = get(e.added + j * L + x);
        s = added == splat(-kInf<Real>) ? added : s + added;
      }
      s = visible.select(j, s, -kInf<Real>);
      if constexpr (kGeneral || kMasked) put(at, s);
      m = m > s ? m : s;
    }
    // A lane that has kept no key yet subtracts 0, so that -inf stays -inf.
    const Vec<Real> reference = m == splat(-kInf<Real>) ? Vec<Real>{} : m;
    Vec<Real> sum = {};
    for (int j = 0; j < t.keys; j++) {
      Real* at = t.s + j * L + x;
      const Vec<Real> p = exp<Real>(get(at) - reference);
      sum += p;
      put(at, e.factor ? p * get(e.factor + j * L + x) : p);
    }
    const Vec<Real> shrink = exp<Real>(before - reference);
    put(t.maximum + x, m);
    put(t.sum + x, get(t.sum + x) * shrink + sum);
    bool same = true;
    for (int y = 0; y < W; y++) same &= shrink[y] == Real(1);
    if (same) continue;
    for (int c = 0; c < t.o_rows; c++) put(t.o + c * L + x, get(t.o + c * L + x) * shrink);
  }
}

template <class Real, bool kMasked, bool kGeneral>
void gradient_tile(const Gradient<Real>& t) {
  constexpr int W = kWidth<Real>;
  const Elementwise<Real> e = kGeneral ? t.elementwise : Elementwise<Real>{};
  const Vec<Real> most = splat(-ExpConstants<Real>::kMin);
  for (int x = 0; x < t.n; x += W) {
    const Visible<Real, kMasked> visible(t.bounds, x);
    const Vec<Real> lse = get(t.lse + x), delta = get(t.delta + x);
    for (int j = 0; j < t.keys; j++) {
      Real *s_at = t.s.data + j * t.s.ld + x, *dp_at = t.dp.data + j * t.dp.ld + x;
      Vec<Real> capped = get(s_at), dp = get(dp_at), added = {};
      if constexpr (kGeneral) capped = t.score.template apply<Math<Real>>(capped);
      if (e.added) added = get(e.added + j * t.s.ld + x);
      const Vec<Real> above = capped + added - lse;
      Vec<Real> p = visible.select(j, exp<Real>(above > most ? most : above), Real(0));
      if (e.added) p = added == splat(-kInf<Real>) ? Vec<Real>{} : p;
      Vec<Real> factor = splat(Real(1));
      if (e.factor) factor = get(e.factor + j * t.s.ld + x), dp *= factor;
      Vec<Real> ds = visible.select(j, p * (dp - delta), Real(0));  // a NaN of a key that the lane does not see
      if (e.added) {
        ds = added == splat(-kInf<Real>) ? Vec<Real>{} : ds;
        put(e.added + j * t.s.ld + x, ds);
      }
      if constexpr (kGeneral) ds = ds == Vec<Real>{} ? ds : ds * t.score.slope(capped);
      put(s_at, e.factor ? p * factor : p);
      put(dp_at, ds);
    }
  }
}

// Calls tile<kMasked, kGeneral> for a Softmax or a Gradient.
template <class Real>
void softmax(const Softmax<Real>& t) {
  const bool general = is_general(t.score, t.elementwise);
  if (t.bounds.begin)
    general ? softmax_tile<Real, true, true>(t) : softmax_tile<Real, true, false>(t);
  else
    general ? softmax_tile<Real, false, true>(t) : softmax_tile<Real, false, false>(t);
}
template <class Real>
void gradient(const Gradient<Real>& t) {
  const bool general = is_general(t.score, t.elementwise);
  if (t.bounds.begin)
    general ? gradient_tile<Real, true, true>(t) : gradient_tile<Real, true, false>(t);
  else
    general ? gradient_tile<Real, false, true>(t) : gradient_tile<Real, false, false>(t);
}

// Rows lie N * D elements apart, where no hardware prefetcher finds them.
inline constexpr int kRowsAhead = 8;

template <class E, class Real>
void pack(View<const E> from, int rows, int cols, Real scale, Tile<Real> to) {
  constexpr int W = kWidth<Real>;
  const int whole = from.col == 1 ? cols / W * W : 0;  // columns that lie side by side, in vectors
  for (int r = 0; r < rows; r++) {
    const E* row = from.data + r * from.row;
    Real* packed = to.data + r * to.ld;
    if (r + kRowsAhead < rows)
      for (int c = 0; c < whole; c += 64 / sizeof(E)) __builtin_prefetch(row + kRowsAhead * from.row + c);
    for (int c = 0; c < whole; c += W) put(packed + c, load_vector(row + c) * scale);
    for (int64_t c = whole; c < to.ld; c += W) put(packed + c, Vec<Real>{});
    for (int c = whole; c < cols; c++) packed[c] = load(row[c * from.col]) * scale;
  }
}

template <class E, class Real>
void unpack(View<const Real> from, int rows, int cols, Real scale, View<E> to) {
  constexpr int W = kWidth<Real>;
  const int whole = from.col == 1 && to.col == 1 ? cols / W * W : 0;
  for (int r = 0; r < rows; r++) {
    const Real* source = from.data + r * from.row;
    E* row = to.data + r * to.row;
    for (int c = 0; c < whole; c += W) store_vector(row + c, load_vector(source + c) * scale);
    for (int c = whole; c < cols; c++) store(row + c * to.col, source[c * from.col] * scale);
  }
}

template <class Real>
void accumulate(Tile<const Real> from, int rows, int cols, bool add, View<Real> to) {
  constexpr int W = kWidth<Real>;
  const int whole = to.col == 1 ? cols / W * W : 0;
  for (int r = 0; r < rows; r++) {
    const Real* term = from.data + r * from.ld;
    Real* sum = to.data + r * to.row;
    for (int c = 0; c < whole; c += W)
      store_vector(sum + c, add ? load_vector(sum + c) + get(term + c) : get(term + c));
    for (int c = whole; c < cols; c++) sum[c * to.col] = add ? sum[c * to.col] + term[c] : term[c];
  }
}

template <class Real>
void transpose(Tile<const Real> from, int rows, int cols, Tile<Real> to) {
  constexpr int W = kWidth<Real>;
  for (int c = 0; c < cols; c += W)
    for (int r = 0; r < rows; r += W) {
      Vec<Real> square[W];
#pragma GCC unroll 16
      for (int x = 0; x < W; x++) square[x] = get(from.data + (r + x) * from.ld + c);
      transpose_square<Real>(square);
#pragma GCC unroll 16
      for (int x = 0; x < W; x++) put(to.data + (c + x) * to.ld + r, square[x]);
    }
}

template <class E, class Real>
void row_dots(View<const E> a, View<const E> b, int rows, int cols, Real* to) {
  constexpr int W = kWidth<Real>;
  const int whole = a.col == 1 && b.col == 1 ? cols / W * W : 0;
  for (int r = 0; r < rows; r++) {
    const E *x = a.data + r * a.row, *y = b.data + r * b.row;
    Vec<Real> part = {};
    for (int c = 0; c < whole; c += W) part += load_vector(x + c) * load_vector(y + c);
    Real sum = 0;
    for (int u = 0; u < W; u++) sum += part[u];
    for (int c = whole; c < cols; c++) sum += load(x[c * a.col]) * load(y[c * b.col]);
    to[r] = sum;
  }
}

template <class E>
constexpr Ops<E> ops_of() {
  using Real = typename RealOf<E>::type;
  return {.lanes = kLanes<Real>,
          .gemm = gemm<Real>,
          .softmax = softmax<Real>,
          .gradient = gradient<Real>,
          .pack = pack<E, Real>,
          .transpose = transpose<Real>,
          .unpack = unpack<E, Real>,
          .accumulate = accumulate<Real>,
          .row_dots = row_dots<E, Real>};
}

constexpr OpsTable kTable = {ops_of<float>(), ops_of<double>(), ops_of<BF16>(), ops_of<F16>()};

}  // namespace
}  // namespace jax_flash2::cpu
