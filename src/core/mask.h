// Who sees whom. `visible` is the law; every range below is derived from it, and tests/cpp proves each against it.
// The same object in every backend and both passes: bounds that hold for all rows, or the spans of packed sequences and
// documents, which are read row by row. Knows no tensor.
#pragma once
#include "core/spec.h"

namespace jax_flash2 {

// T and S stay below this, so that sums of three positions fit an int32.
inline constexpr int kMaxLength = 1 << 29;

JAX_FLASH2_HD constexpr int min_(int a, int b) { return a < b ? a : b; }
JAX_FLASH2_HD constexpr int max_(int a, int b) { return a > b ? a : b; }
JAX_FLASH2_HD constexpr int clamp_(int x, int lo, int hi) { return min_(max_(x, lo), hi); }

struct Range {  // [begin, end), empty when begin >= end
  int begin, end;
  JAX_FLASH2_HD constexpr bool has(int x) const { return begin <= x && x < end; }
};

// The tiles that a tile of the other side meets: some elements kept in [begin, full_begin) and [full_end, end), and in
// [full_begin, full_end) every live query of the tile sees every key, so no mask is needed there.
// Always begin <= full_begin <= full_end <= end; begin == end: nothing to do.
struct Tiles {
  int begin, full_begin, full_end, end;
};

// The keys of a query, or the queries of a key, as an operand gives them.
struct alignas(8) Span {
  int32_t first, end;  // first: begin, or ~begin where the row reads nothing (the key has no reader) all the same

  JAX_FLASH2_HD constexpr int begin() const { return first < 0 ? ~first : first; }
  JAX_FLASH2_HD constexpr bool alive() const { return 0 <= first && first < end; }
  JAX_FLASH2_HD constexpr Range range() const { return alive() ? Range{first, end} : Range{0, 0}; }
};

// Rows, or keys, that take part at all. Those outside may hold NaN and are never read: kernels load zero for them, write
// zero, and treat a dead query's lse as +inf in the backward.
struct Live : Range {
  const Span* spans;

  JAX_FLASH2_HD constexpr bool has(int x) const { return Range::has(x) && (!spans || spans[x].alive()); }
};

struct Mask {
  int q_len, k_len;  // clamped to [0, T] and [0, S]
  int left, right;   // clamped to [0, kMaxLength]
  int off;           // query i stands at key position i + off
  // In place of windows, where there are any: [T] and [S], as core/spec.h says; read below q_len and k_len only.
  const Span *key_spans = nullptr, *query_spans = nullptr;
  bool exact = true;   // no operand removes pairs that these bounds leave; else no tile is full
  bool sparse = true;  // spans may be those of dead rows

  static JAX_FLASH2_HD Mask make(const Spec& spec, int q_len, int k_len) {
    auto bound = [](int64_t w) { return w < 0 || w > kMaxLength ? kMaxLength : static_cast<int>(w); };
    return {q_len, k_len, bound(spec.window_left), bound(spec.window_right), spec.bottom_right ? k_len - q_len : 0};
  }

  // What core/spec.h calls span_flags.
  JAX_FLASH2_HD constexpr uint32_t flags() const { return uint32_t{exact} | uint32_t{!sparse} << 1; }
  JAX_FLASH2_HD constexpr Mask with_flags(uint32_t flags) const {
    Mask m = *this;
    m.exact = flags & 1, m.sparse = !(flags & 2);
    return m;
  }

  JAX_FLASH2_HD constexpr bool visible(int i, int j) const {
    if (key_spans) return keys(i).has(j) && queries(j).has(i);
    return i < q_len && j < k_len && i + off - left <= j && j <= i + off + right;
  }

  // Of query i, to be asked for before it is needed: where there are spans, its own.
  JAX_FLASH2_HD constexpr Span span_of_query(int i) const {
    if (key_spans) return i < q_len ? key_spans[i] : Span{~0, 0};
    const Range seen = keys(i);
    return seen.begin < seen.end ? Span{seen.begin, seen.end} : Span{~0, 0};
  }

  // Of key j, where there are spans.
  JAX_FLASH2_HD constexpr Span span_of_key(int j) const { return j < k_len ? query_spans[j] : Span{~0, 0}; }

  // Keys that query i sees, and queries that see key j.
  JAX_FLASH2_HD constexpr Range keys(int i) const {
    if (key_spans) return i < q_len ? key_spans[i].range() : Range{0, 0};
    return {max_(0, i + off - left), i < q_len ? min_(k_len, i + off + right + 1) : 0};
  }
  JAX_FLASH2_HD constexpr Range queries(int j) const {
    if (query_spans) return j < k_len ? query_spans[j].range() : Range{0, 0};
    return {max_(0, j - off - right), j < k_len ? min_(q_len, j - off + left + 1) : 0};
  }

  // Queries that see a key at all, and keys that a query sees at all.
  JAX_FLASH2_HD constexpr Live live_queries() const {
    if (key_spans) return {{0, q_len}, sparse ? key_spans : nullptr};
    return {{max_(0, -off - right), k_len > 0 ? min_(q_len, k_len - off + left) : 0}, nullptr};
  }
  JAX_FLASH2_HD constexpr Live live_keys() const {
    if (query_spans) return {{0, k_len}, sparse ? query_spans : nullptr};
    return {{max_(0, off - left), q_len > 0 ? min_(k_len, q_len + off + right) : 0}, nullptr};
  }

  // Tiles of `size` keys that the queries [i0, i1) meet.
  JAX_FLASH2_HD constexpr Tiles key_tiles(int i0, int i1, int size) const {
    if (key_spans) return span_tiles(key_spans, i0, min_(i1, q_len), size, true);
    const Range live = live_queries();
    const int a = max_(i0, live.begin), b = min_(i1, live.end) - 1;  // first and last live query
    if (a > b) return {0, 0, 0, 0};
    if (!exact) return tiles(keys(a).begin, keys(b).end, 0, 0, size);
    return tiles(keys(a).begin, keys(b).end, max_(0, b + off - left), min_(k_len, a + off + right + 1), size);
  }

  // Tiles of `size` queries that meet the keys [j0, j1). A tile whose keys reach past the last key is never full.
  JAX_FLASH2_HD constexpr Tiles query_tiles(int j0, int j1, int size) const {
    if (query_spans) return span_tiles(query_spans, j0, min_(j1, k_len), size, j1 <= k_len);
    const Range live = live_keys();
    const int a = max_(j0, live.begin), b = min_(j1, live.end) - 1;
    if (a > b) return {0, 0, 0, 0};
    int full_begin = 0, full_end = 0;
    if (exact && j1 <= k_len) {  // dead queries count as full, so the range may grow over them
      const Range queries_live = live_queries();
      full_begin = j1 - 1 - off - right, full_end = j0 - off + left + 1;
      if (full_begin <= queries_live.begin) full_begin = 0;
      if (full_end >= queries_live.end) full_end = kMaxLength;
    }
    return tiles(queries(a).begin, queries(b).end, full_begin, full_end, size);
  }

  // How many tiles of `keys` keys that meet a tile of `queries` queries come before `key_tile`, which does: the order in
  // which a deterministic backward adds to dQ.
  JAX_FLASH2_HD constexpr int key_tiles_before(int key_tile, int query_tile, int queries, int keys,
                                               bool descending) const {
    const int i0 = query_tile * queries;
    if (!query_spans) {
      const Tiles met = key_tiles(i0, i0 + queries, keys);
      return descending ? met.end - 1 - key_tile : key_tile - met.begin;
    }
    int count = 0;  // some on the way may meet no query at all
    for (int tile = key_tile + (descending ? 1 : -1); 0 <= tile && tile * keys < k_len; tile += descending ? 1 : -1) {
      const int first = tile * keys, last = min_(first + keys, k_len) - 1;
      if (descending ? query_spans[first].begin() >= i0 + queries : query_spans[last].end <= i0) break;
      const Tiles met = query_tiles(first, first + keys, queries);
      count += met.begin <= query_tile && query_tile < met.end;
    }
    return count;
  }

 private:
  // Of the rows [a, b): what is between the first and the last one's ends, full where both have it.
  JAX_FLASH2_HD constexpr Tiles span_tiles(const Span* spans, int a, int b, int size, bool may_be_full) const {
    if (a >= b) return {0, 0, 0, 0};
    const Span first = spans[a], last = spans[b - 1];
    const bool full = exact && may_be_full;
    return tiles(first.begin(), last.end, full ? last.begin() : 0, full ? first.end : 0, size);
  }
  static JAX_FLASH2_HD constexpr Tiles tiles(int begin, int end, int full_begin, int full_end, int size) {
    if (begin >= end) return {0, 0, 0, 0};
    const int first = begin / size, last = (end + size - 1) / size;
    int full_first = clamp_((full_begin + size - 1) / size, first, last);
    int full_last = clamp_(full_end / size, first, last);
    if (full_first >= full_last) full_first = full_last = first;
    return {first, full_first, full_last, last};
  }
};

}  // namespace jax_flash2
