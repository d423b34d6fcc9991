// The inner loops as a table of functions, one table per element type and instruction set. They see packed tiles and
// per-lane bounds; batches, heads, masks and threads belong to their callers. Queries lie along the lanes of vectors:
// a score tile is [key][query], so a row's maximum and sum need no shuffles and a mask is two comparisons.
#pragma once
#include "core/problem.h"
#include "cpu/element.h"

namespace jax_flash2::cpu {

// A matrix in the caller's memory: element (r, c) is data[r * row + c * col].
template <class E>
struct View {
  E* data;
  int64_t row, col;
};

// A packed matrix: element (r, c) is data[r * ld + c]; every row is aligned to a vector and has room for whole ones.
template <class Real>
struct Tile {
  Real* data;
  int64_t ld;
};

// c = a b, or c += a b. a is m x k with unit stride one way or the other, b is k x n, and n is a multiple of Ops::lanes.
template <class Real>
struct Gemm {
  struct {
    int m, n, k;
  } size;
  View<const Real> a;
  Tile<const Real> b;
  Tile<Real> c;
  bool add;
};

// Lane x of a score tile keeps the keys [begin[x], end[x]), counted from the tile's first row; null: it keeps all.
template <class Real>
struct Bounds {
  const Real *begin = nullptr, *end = nullptr;
};

// What operands do to a score tile, pair by pair, prepared by the caller in the layout of the tile; null: nothing.
// `added` is what the pair adds to its score, -inf where it is removed; `factor` what dropout multiplies its probability by.
template <class Real>
struct Elementwise {
  Real* added = nullptr;
  const Real* factor = nullptr;
};

// One step of online softmax over a tile of dot products s [keys][lanes]: s becomes exp(score - maximum), and the running
// maximum, sum and output o [o_rows][lanes] follow.
template <class Real>
struct Softmax {
  Real* s;
  int keys;
  Bounds<Real> bounds;
  Score<Real> score;  // of an already scaled product
  Elementwise<Real> elementwise;
  Real *maximum, *sum, *o;
  int o_rows;
};

// Dot products s [keys][n] become probabilities, and dp [keys][n] = dout . v becomes the gradient of s. elementwise.added
// becomes the gradient of itself.
template <class Real>
struct Gradient {
  Tile<Real> s, dp;
  int keys, n;
  Bounds<Real> bounds;
  Score<Real> score;  // of an already scaled product
  Elementwise<Real> elementwise;
  const Real *lse, *delta;
};

template <class E>
struct Ops {
  using Real = typename RealOf<E>::type;
  int lanes;  // queries that one pass of `softmax` takes

  void (*gemm)(const Gemm<Real>&);
  void (*softmax)(const Softmax<Real>&);
  void (*gradient)(const Gradient<Real>&);

  // to(r, c) = from(r, c) * scale, and 0 for the columns from `cols` up to ld.
  void (*pack)(View<const E> from, int rows, int cols, Real scale, Tile<Real> to);
  // to(c, r) = from(r, c), for whole vectors of rows and columns.
  void (*transpose)(Tile<const Real> from, int rows, int cols, Tile<Real> to);
  // to(r, c) = from(r, c) * scale, rounded to nearest even.
  void (*unpack)(View<const Real> from, int rows, int cols, Real scale, View<E> to);
  // to(r, c) = from(r, c), added to it where `add`.
  void (*accumulate)(Tile<const Real> from, int rows, int cols, bool add, View<Real> to);
  // to[r] = sum_c a(r, c) * b(r, c).
  void (*row_dots)(View<const E> a, View<const E> b, int rows, int cols, Real* to);
};

// One instruction set.
struct OpsTable {
  Ops<float> f32;
  Ops<double> f64;
  Ops<BF16> bf16;
  Ops<F16> f16;

  const Ops<float>& of(float) const { return f32; }
  const Ops<double>& of(double) const { return f64; }
  const Ops<BF16>& of(BF16) const { return bf16; }
  const Ops<F16>& of(F16) const { return f16; }
};

// Null where this build has no such code.
const OpsTable* ops_baseline();
const OpsTable* ops_avx2();
const OpsTable* ops_avx512();

}  // namespace jax_flash2::cpu
