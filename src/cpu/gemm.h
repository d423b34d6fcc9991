// The one matrix product behind all seven of attention's: a block of c stays in registers while k runs.
// Knows no attention. Internal linkage throughout, for the reason given in element.h.
#pragma once
#include "cpu/ops.h"
#include "cpu/simd.h"

namespace jax_flash2::cpu {
namespace {

// A block is kBlockRows x kBlockVectors vectors: with 16 registers 12 sums, 2 of b and 1 broadcast of a. The 8 sums that
// hide the latency of two FMA units are there even for the last rows of most sizes.
inline constexpr int kBlockVectors = 2;
inline constexpr int kBlockRows = kRegisters == 32 ? 8 : 6;
template <class Real>
inline constexpr int kLanes = kBlockVectors * kWidth<Real>;

// Rows [0, kRows) of c x one block of lanes. kRowMajor: the columns of a have unit stride, else its rows have.
template <class Real, int kRows, bool kRowMajor>
inline void gemm_block(const Gemm<Real>& g, const Real* a, const Real* b, Real* c) {
  constexpr int W = kWidth<Real>;
  Vec<Real> sum[kRows][kBlockVectors] = {};
  const int64_t a_row = kRowMajor ? g.a.row : 1, a_col = kRowMajor ? 1 : g.a.col, ldb = g.b.ld;
#pragma GCC unroll 2
  for (int k = 0; k < g.size.k; k++, a += a_col, b += ldb) {
    const Vec<Real> b0 = get(b), b1 = get(b + W);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; r++) {
      const Vec<Real> ar = splat(a[r * a_row]);
      sum[r][0] += ar * b0;
      sum[r][1] += ar * b1;
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; r++)
#pragma GCC unroll 2
    for (int x = 0; x < kBlockVectors; x++) {
      Real* to = c + r * g.c.ld + x * W;
      put(to, g.add ? get(to) + sum[r][x] : sum[r][x]);
    }
}

// The last `rows` < kRows rows.
template <class Real, int kRows, bool kRowMajor>
inline void gemm_rest(const Gemm<Real>& g, int rows, const Real* a, const Real* b, Real* c) {
  if constexpr (kRows > 1) {
    if (rows == kRows - 1) return gemm_block<Real, kRows - 1, kRowMajor>(g, a, b, c);
    gemm_rest<Real, kRows - 1, kRowMajor>(g, rows, a, b, c);
  }
}

template <class Real, bool kRowMajor>
void gemm_rows(const Gemm<Real>& g) {
  const int64_t a_row = kRowMajor ? g.a.row : 1;
  for (int n = 0; n < g.size.n; n += kLanes<Real>) {
    const Real *a = g.a.data, *b = g.b.data + n;
    Real* c = g.c.data + n;
    int m = 0;
    for (; m + kBlockRows <= g.size.m; m += kBlockRows)
      gemm_block<Real, kBlockRows, kRowMajor>(g, a + m * a_row, b, c + m * g.c.ld);
    gemm_rest<Real, kBlockRows, kRowMajor>(g, g.size.m - m, a + m * a_row, b, c + m * g.c.ld);
  }
}

template <class Real>
void gemm(const Gemm<Real>& g) {
  g.a.col == 1 ? gemm_rows<Real, true>(g) : gemm_rows<Real, false>(g);
}

}  // namespace
}  // namespace jax_flash2::cpu
