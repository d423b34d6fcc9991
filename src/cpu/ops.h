// The inner loops as a table of functions, one table per element type and instruction set. They see packed tiles and
// per-lane bounds; batches, heads, masks and threads belong to their callers. Queries lie along the lanes of vectors:
// a score tile is [key][query], so a row's maximum and sum need no shuffles and a mask is two comparisons.
#pragma once
#include "core/problem.h"
#include "cpu/element.h"

namespace jax_flash2::cpu {

// c[m][n] = sum_k a[m * a_row + k * a_col] * b[k][n], added to c where `add`. Either a_row or a_col is 1. n is a multiple
// of Ops::lanes, b and c are aligned to a vector and so are their leading dimensions.
template <class Real>
struct Gemm {
  int m, n, k;
  const Real* a;
  int64_t a_row, a_col;
  const Real* b;
  int64_t ldb;
  Real* c;
  int64_t ldc;
  bool add;
};

// Lane x of a score tile keeps the keys [begin[x], end[x]), counted from the tile's first row; null: it keeps all.
template <class Real>
struct Bounds {
  const Real *begin, *end;
};

// One step of online softmax over a tile of dot products s [keys][lanes]: s becomes exp(score - maximum), and the running
// maximum, sum and output o [o_rows][lanes] follow.
template <class Real>
struct Softmax {
  Real* s;
  int keys;
  Bounds<Real> bounds;
  Score<Real> score;  // of an already scaled product
  Keep keep;
  int i0, j0;
  Real *maximum, *sum, *o;
  int o_rows;
};

// Dot products s [keys][n] become probabilities, and dp [keys][n] = dout . v becomes the gradient of s.
template <class Real>
struct Gradient {
  Real *s, *dp;
  int keys, n;
  int64_t ld;
  Bounds<Real> bounds;
  Score<Real> score;
  Keep keep;
  DScore dscore;
  int i0, j0;
  const Real *lse, *delta;
};

// A matrix in the caller's memory: element (r, c) is data[r * row + c * col].
template <class E>
struct View {
  E* data;
  int64_t row, col;
};

template <class E>
struct Ops {
  using Real = typename RealOf<E>::type;
  int lanes;  // queries that one pass of `softmax` takes

  void (*gemm)(const Gemm<Real>&);
  void (*softmax)(const Softmax<Real>&);
  void (*gradient)(const Gradient<Real>&);

  // to[r][c] = from(r, c) * scale; columns up to ld, a multiple of a vector, become 0.
  void (*pack)(View<const E> from, int rows, int cols, Real scale, Real* to, int64_t ld);
  // to[c][r] = from(r, c) * scale.
  void (*pack_transposed)(View<const E> from, int rows, int cols, Real scale, Real* to, int64_t ld);
  // to(r, c) = from[r][c] * scale, rounded to nearest even.
  void (*unpack)(const Real* from, int64_t ld, int rows, int cols, Real scale, View<E> to);
  // to(r, c) = from[c][r] * scale[r].
  void (*unpack_transposed)(const Real* from, int64_t ld, int rows, int cols, const Real* scale, View<E> to);
  // to[r] = sum_c a(r, c) * b(r, c).
  void (*row_dots)(View<const E> a, View<const E> b, int rows, int cols, Real* to);
};

// One instruction set.
struct OpsTable {
  Ops<float> f32;
  Ops<double> f64;
  Ops<BF16> bf16;
  Ops<F16> f16;

  template <class E>
  const Ops<E>& get() const {
    if constexpr (sizeof(E) == 8) {
      return f64;
    } else if constexpr (sizeof(E) == 4) {
      return f32;
    } else if constexpr (__is_same(E, BF16)) {
      return bf16;
    } else {
      return f16;
    }
  }
};

// Null where this build has no such code.
const OpsTable* ops_baseline();
const OpsTable* ops_avx2();
const OpsTable* ops_avx512();

// The best that this machine runs.
const OpsTable& ops();

}  // namespace jax_flash2::cpu
