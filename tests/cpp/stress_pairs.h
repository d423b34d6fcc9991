// Who sees whom, pair by pair, for stress.cu: packed sequences, documents, ids in any order, arbitrary masks; a table of
// it for the reference, and the operands by which a kernel is told. Knows no kernel; shares no law with src/core.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "stress_case.h"
#include "stress_reference.cuh"

namespace stress {

struct PairOperands {
  std::vector<uint8_t> table;                      // [B, T, S]
  std::vector<uint8_t> mask;                       // likewise, or empty
  std::vector<int> query_ids, key_ids;             // [B, T], [B, S], or empty
  std::vector<int> key_spans, query_spans, flags;  // [B, T, 2], [B, S, 2], [B]
};

// Spans of the rows of a table (its columns: across), as src/core/spec.h wants them. True: they say all of it.
inline bool find_spans(const uint8_t* table, int rows, int cols, int64_t row_step, int64_t col_step, int* spans) {
  std::vector<int> begin(rows, cols), end(rows, 0), count(rows, 0);
  for (int i = 0; i < rows; i++)
    for (int j = 0; j < cols; j++) {
      if (!table[i * row_step + j * col_step]) continue;
      begin[i] = std::min(begin[i], j), end[i] = j + 1, count[i]++;
    }
  bool exact = true;
  for (int i = rows - 2; i >= 0; i--) begin[i] = std::min(begin[i], begin[i + 1]);
  for (int i = 1; i < rows; i++) end[i] = std::max(end[i], end[i - 1]);
  for (int i = 0; i < rows; i++) {
    exact &= count[i] == 0 || end[i] - begin[i] == count[i];
    spans[2 * i] = count[i] ? begin[i] : ~begin[i], spans[2 * i + 1] = end[i];
  }
  return exact;
}

inline PairOperands draw_pairs(const Case& c, const std::vector<Row>& bounds) {
  Random r(c.seed ^ 0x5eed);
  const int B = c.B(), T = c.T, S = c.S;
  PairOperands p;
  p.table.assign(int64_t(B) * T * S, 0), p.flags.assign(B, 0);
  p.key_spans.assign(int64_t(B) * T * 2, 0), p.query_spans.assign(int64_t(B) * S * 2, 0);
  const bool ids = c.pairs == Pairs::documents || c.pairs == Pairs::ids;
  if (ids) p.query_ids.assign(int64_t(B) * T, -1), p.key_ids.assign(int64_t(B) * S, -1);
  if (c.pairs == Pairs::mask) p.mask.assign(p.table.size(), 0);
  for (int b = 0; b < B; b++) {
    uint8_t* const table = p.table.data() + int64_t(b) * T * S;
    int* const query_ids = ids ? p.query_ids.data() + int64_t(b) * T : nullptr;
    int* const key_ids = ids ? p.key_ids.data() + int64_t(b) * S : nullptr;
    const int longest = r.of({3, 40, 200, 1000});
    const auto fill_ids = [&](int* of, int length, Random random) {
      int id = 0;
      for (int x = 0; x < length;) {
        const int until = std::min(length, x + random.within(0, longest));
        for (; x < until; x++) of[x] = id;
        id = c.pairs == Pairs::ids ? random.within(-1, 4) : id + 1;
        if (c.pairs == Pairs::documents && random.chance(0.1)) break;  // the rest is padding
      }
    };
    if (c.pairs == Pairs::packed) {  // sequences with gaps; windows are of each
      for (int i = 0, j = 0; i < T || j < S;) {
        const int rows = r.within(0, longest), keys = r.chance(0.6) ? rows : r.within(0, longest);
        const int i1 = std::min(T, i + rows), j1 = std::min(S, j + keys);
        const int64_t off = c.packed_bottom_right ? j1 - i1 : j - i;
        for (int x = i; x < i1; x++)
          for (int y = j; y < j1; y++)
            table[int64_t(x) * S + y] = (c.packed_left < 0 || y >= x + off - c.packed_left) &&
                                        (c.packed_right < 0 || y <= x + off + c.packed_right);
        const int gap = r.chance(0.3) ? r.within(0, 9) : 0;
        i = std::min(T, i1 + gap), j = std::min(S, j1 + gap);
        if (r.chance(0.05)) break;
      }
    } else if (ids) {
      const Random same = r;
      fill_ids(query_ids, T, r);
      fill_ids(key_ids, S, T == S && r.chance(0.7) ? same : Random(r.next()));
    }
    const double density = r.of({0.02, 0.5, 0.97});
    const int rows_of = r.of({1, 7, 64, 200}), keys_of = r.of({1, 7, 64, 200});  // blocks of pairs that share a fate
    for (int i = 0; i < T; i++)
      for (int j = 0; j < S; j++) {
        uint8_t& at = table[int64_t(i) * S + j];
        if (c.pairs == Pairs::mask) {
          const bool kept =
              Random(c.seed * 77 + (int64_t(i / rows_of) * 100003 + j / keys_of) * 31 + b).chance(density);
          p.mask[(int64_t(b) * T + i) * S + j] = kept;
          at = kept && bounds[b].sees(i, j);
        } else if (ids) {
          at = query_ids[i] >= 0 && query_ids[i] == key_ids[j] && bounds[b].sees(i, j);
        }
      }
    const bool rows_exact = find_spans(table, T, S, S, 1, p.key_spans.data() + int64_t(b) * T * 2);
    const bool keys_exact = find_spans(table, S, T, 1, S, p.query_spans.data() + int64_t(b) * S * 2);
    const auto nobody_dead = [](const int* spans, int rows) {
      return std::all_of(spans, spans + 2 * rows, [](int x) { return x >= 0; });
    };
    const bool all_alive = nobody_dead(p.key_spans.data() + int64_t(b) * T * 2, T) &&
                           nobody_dead(p.query_spans.data() + int64_t(b) * S * 2, S);
    p.flags[b] = (rows_exact && keys_exact) | all_alive << 1;
  }
  return p;
}

}  // namespace stress
