// What operands do to each pair, laid out as the score tiles of ops.h are: [key][query]. Knows no instruction set.
#pragma once
#include <limits>

#include "core/problem.h"
#include "cpu/ops.h"

namespace jax_flash2::cpu {

// to(j, i) = the addend of query rows.begin + i and key keys.begin + j, and 0 for the lanes behind the last row. False: it
// removes every pair, and the tile is left as it is.
template <class Real>
bool fill_added(const Addend<Real>& addend, const Range& rows, const Range& keys, int lanes, Tile<Real> to) {
  const int n = rows.end - rows.begin, m = keys.end - keys.begin;
  if (addend.query_ids) {  // documents packed in order: most tiles have no id in common
    Range queries = {addend.query_ids[rows.begin], addend.query_ids[rows.begin]}, other = queries;
    for (int i = 0; i < n; i++) {
      const int id = addend.query_ids[rows.begin + i];
      queries = {min_(queries.begin, id), max_(queries.end, id)};
    }
    other = {addend.key_ids[keys.begin], addend.key_ids[keys.begin]};
    for (int j = 0; j < m; j++) {
      const int id = addend.key_ids[keys.begin + j];
      other = {min_(other.begin, id), max_(other.end, id)};
    }
    if (queries.end < other.begin || other.end < queries.begin || queries.end < 0) return false;
  }
  bool any = false;
  for (int j = 0; j < m; j++) {
    Real* const row = to.data + j * to.ld;
    for (int i = 0; i < n; i++) {
      row[i] = addend.at(rows.begin + i, keys.begin + j);
      any |= row[i] != -std::numeric_limits<Real>::infinity();
    }
    for (int i = n; i < lanes; i++) row[i] = 0;
  }
  return any;
}

// to(j, i) = what dropout multiplies the probability of query i0 + i and key j0 + j by. A block of random words serves
// four of them, so that the tile is walked by blocks.
template <class Real>
void fill_factor(const Dropout<Real>& dropout, int i0, int n, int j0, int m, Tile<Real> to) {
  const auto each = [](int begin, int count, auto body) {  // x with bit 3 clear, of all pairs {x, x + 8} that are met
    for (int x = begin & ~15; x < begin + count; x += (x & 7) == 7 ? 9 : 1)
      if (x >= begin || (x + 8 >= begin && x + 8 < begin + count)) body(x);
  };
  each(j0, m, [&](int j) {
    each(i0, n, [&](int i) {
      const uint32_t kept = dropout.kept(i, j);
      for (int x = 0; x < 4; x++) {
        const int r = i + (x & 2 ? 8 : 0) - i0, c = j + (x & 1 ? 8 : 0) - j0;
        if (0 <= r && r < n && 0 <= c && c < m) to.data[c * to.ld + r] = kept >> x & 1 ? dropout.scale : 0;
      }
    });
  });
}

}  // namespace jax_flash2::cpu
