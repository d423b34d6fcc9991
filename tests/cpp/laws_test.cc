// Proves the laws of src/core without a GPU: every range of Mask against `visible` by exhaustion, Score against its
// formula and finite differences, Addend and Dropout against theirs, and the index arithmetic of Problem; and that the
// Hopper kernels' schedules miss no tile. Built by g++ and by nvcc, whose host compiler, and front end for device code,
// must read the same headers the same way.
#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <limits>
#include <random>
#include <vector>

#include "core/problem.h"
#include "cuda/sm90/backward_schedule.h"
#include "cuda/sm90/schedule.h"
#include "cuda/sm90/sequences.h"

namespace jax_flash2 {
namespace {

long checks = 0, failures = 0;

void expect(bool ok, const Mask& m, const char* format, ...) {
  checks++;
  if (ok || ++failures > 20) return;
  std::printf("FAILED q_len=%d k_len=%d left=%d right=%d off=%d: ", m.q_len, m.k_len, m.left, m.right, m.off);
  va_list args;
  va_start(args, format);
  std::vprintf(format, args);
  va_end(args);
  std::printf("\n");
}

// What a mask means, as a table of `visible` alone: nothing here knows a range.
struct Table {
  int rows, cols;
  std::vector<char> seen;  // [rows, cols]

  Table(const Mask& m, int rows_, int cols_) : rows(rows_), cols(cols_), seen(rows_ * cols_) {
    for (int i = 0; i < rows; i++)
      for (int j = 0; j < cols; j++) seen[i * cols + j] = m.visible(i, j);
  }
  bool at(int i, int j) const { return i < rows && j < cols && seen[i * cols + j]; }
  bool row_live(int i) const {
    for (int j = 0; j < cols; j++)
      if (at(i, j)) return true;
    return false;
  }
  bool col_live(int j) const {
    for (int i = 0; i < rows; i++)
      if (at(i, j)) return true;
    return false;
  }
  // Of the block [i0, i1) x [j0, j1): is any element seen, and does every live row see every key?
  bool any(int i0, int i1, int j0, int j1) const {
    for (int i = i0; i < i1; i++)
      for (int j = j0; j < j1; j++)
        if (at(i, j)) return true;
    return false;
  }
  bool full(int i0, int i1, int j0, int j1, const std::vector<char>& live) const {
    for (int i = i0; i < i1 && i < rows; i++)
      for (int j = j0; live[i] && j < j1; j++)
        if (!at(i, j)) return false;
    return true;
  }
};

void check_ranges(const Mask& m, const Table& t, const std::vector<char>& live_rows,
                  const std::vector<char>& live_cols) {
  for (int i = 0; i < t.rows; i++) {
    expect(m.live_queries().has(i) == bool(live_rows[i]), m, "live_queries at i=%d", i);
    for (int j = 0; j < t.cols; j++) {
      expect(m.keys(i).has(j) == t.at(i, j) && m.span_of_query(i).range().has(j) == t.at(i, j), m, "keys(%d) at j=%d",
             i, j);
      expect(m.queries(j).has(i) == t.at(i, j), m, "queries(%d) at i=%d", j, i);
    }
  }
  for (int j = 0; j < t.cols; j++) expect(m.live_keys().has(j) == bool(live_cols[j]), m, "live_keys at j=%d", j);
}

// `any(tile)` and `full(tile)` say what the table says of one tile; `count` tiles reach past the last row or column.
template <class Any, class Full>
void check_tiles(const Mask& m, const Tiles& tiles, const char* which, int x0, int x1, int size, int count,
                 const Any& any, const Full& full) {
  expect(tiles.begin <= tiles.full_begin && tiles.full_begin <= tiles.full_end && tiles.full_end <= tiles.end, m,
         "%s(%d, %d, %d): order of {%d, %d, %d, %d}", which, x0, x1, size, tiles.begin, tiles.full_begin,
         tiles.full_end, tiles.end);
  expect(tiles.begin >= 0 && tiles.end <= count, m, "%s(%d, %d, %d): out of bounds", which, x0, x1, size);
  for (int tile = 0; tile < count; tile++) {
    const bool met = tiles.begin <= tile && tile < tiles.end;
    const bool bare = tiles.full_begin <= tile && tile < tiles.full_end;
    expect(met == any(tile), m, "%s(%d, %d, %d): tile %d is %smet", which, x0, x1, size, tile, met ? "" : "not ");
    expect(bare == (met && full(tile)), m, "%s(%d, %d, %d): tile %d is %sfull", which, x0, x1, size, tile,
           bare ? "" : "not ");
  }
}

void check_key_tiles(const Mask& m, const Table& t, const std::vector<char>& live, int i0, int i1, int size) {
  const int count = (t.cols + size - 1) / size;
  check_tiles(
      m, m.key_tiles(i0, i1, size), "key_tiles", i0, i1, size, count,
      [&](int tile) { return t.any(i0, i1, tile * size, (tile + 1) * size); },
      [&](int tile) { return t.full(i0, i1, tile * size, (tile + 1) * size, live); });
}

void check_query_tiles(const Mask& m, const Table& t, const std::vector<char>& live, int j0, int j1, int size) {
  const int count = (t.rows + size - 1) / size;
  check_tiles(
      m, m.query_tiles(j0, j1, size), "query_tiles", j0, j1, size, count,
      [&](int tile) { return t.any(tile * size, (tile + 1) * size, j0, j1); },
      [&](int tile) { return t.full(tile * size, (tile + 1) * size, j0, j1, live); });
}

struct Seen {
  Table table;
  std::vector<char> rows, cols;
  Seen(const Mask& m, int extra) : table(m, m.q_len + extra, m.k_len + extra) {
    for (int i = 0; i < table.rows; i++) rows.push_back(table.row_live(i));
    for (int j = 0; j < table.cols; j++) cols.push_back(table.col_live(j));
  }
};

// Every length from 0, every window, both alignments, every block, with blocks and tiles that reach past the last row.
void exhaust_masks(int longest) {
  constexpr int kPast = 2;
  for (int q_len = 0; q_len <= longest; q_len++)
    for (int k_len = 0; k_len <= longest; k_len++)
      for (int left = -1; left <= longest + 1; left++)
        for (int right = -1; right <= longest + 1; right++)
          for (bool bottom_right : {false, true}) {
            const Mask m =
                Mask::make({.window_left = left, .window_right = right, .bottom_right = bottom_right}, q_len, k_len);
            const Seen seen(m, kPast);
            check_ranges(m, seen.table, seen.rows, seen.cols);
            for (int size = 1; size <= 4; size++) {
              for (int i0 = 0; i0 < q_len + kPast; i0++)
                for (int i1 = i0; i1 <= q_len + kPast; i1++) check_key_tiles(m, seen.table, seen.rows, i0, i1, size);
              for (int j0 = 0; j0 < k_len + kPast; j0++)
                for (int j1 = j0; j1 <= k_len + kPast; j1++) check_query_tiles(m, seen.table, seen.rows, j0, j1, size);
            }
          }
}

// The tile sizes that kernels use, on lengths of a few tiles.
void sample_masks(int cases) {
  std::mt19937 random(2);
  const auto draw = [&](int lo, int hi) { return lo + static_cast<int>(random() % (hi - lo + 1)); };
  for (int c = 0; c < cases; c++) {
    const Spec spec{.window_left = draw(0, 2) ? draw(0, 300) : -1,
                    .window_right = draw(0, 2) ? draw(0, 300) : -1,
                    .bottom_right = bool(draw(0, 1))};
    const Mask m = Mask::make(spec, draw(0, 260), draw(0, 260));
    const Seen seen(m, 128);
    for (int rows : {32, 64, 128})
      for (int size : {32, 48, 64, 128}) {
        const int i0 = rows * draw(0, 260 / rows), j0 = rows * draw(0, 260 / rows);
        check_key_tiles(m, seen.table, seen.rows, i0, i0 + rows, size);
        check_query_tiles(m, seen.table, seen.rows, j0, j0 + rows, size);
      }
  }
}

void check_make() {
  const auto same = [](const Mask& m, const Mask& w) {
    expect(m.q_len == w.q_len && m.k_len == w.k_len && m.left == w.left && m.right == w.right && m.off == w.off, m,
           "make");
  };
  same(Mask::make({}, 3, 5), {3, 5, kMaxLength, kMaxLength, 0});
  same(Mask::make({.bottom_right = true}, 3, 5), {3, 5, kMaxLength, kMaxLength, 2});
  same(Mask::make({.window_left = 4, .window_right = 0, .bottom_right = true}, 5, 3), {5, 3, 4, 0, -2});
  same(Mask::make({.window_left = int64_t{1} << 62, .window_right = kMaxLength + 1}, 1, 1),
       {1, 1, kMaxLength, kMaxLength, 0});
}

// At the largest lengths no sum may overflow: in a constant expression that would not compile.
constexpr bool at_the_limit(int q_len, int k_len, int window, int off) {
  const Mask m{q_len, k_len, window, window, off};
  const int i = max_(q_len - 1, 0), j = max_(k_len - 1, 0);
  const Tiles k = m.key_tiles(max_(q_len - 128, 0), q_len, 128), q = m.query_tiles(max_(k_len - 128, 0), k_len, 128);
  return m.keys(i).end <= k_len && m.queries(j).end <= q_len && m.live_queries().end <= q_len &&
         m.live_keys().end <= k_len && k.end <= (k_len + 127) / 128 && q.end <= (q_len + 127) / 128;
}
inline constexpr int kLongest = kMaxLength - 1;
static_assert(at_the_limit(kLongest, kLongest, kMaxLength, 0) && at_the_limit(kLongest, kLongest, 0, 0));
static_assert(at_the_limit(kLongest, 0, kMaxLength, -kLongest) && at_the_limit(0, kLongest, kMaxLength, kLongest));
static_assert(at_the_limit(kLongest, 1, kMaxLength, 1 - kLongest) &&
              at_the_limit(1, kLongest, kMaxLength, kLongest - 1));
static_assert(at_the_limit(kLongest, 1, 0, 1 - kLongest) && at_the_limit(1, kLongest, 0, kLongest - 1));

struct Math {
  template <class Real>
  static JAX_FLASH2_HD Real scaled_tanh(Real x, Real in, Real out) {
    return out * std::tanh(in * x);
  }
};

void check_flags() {
  for (uint32_t flags : {0u, 1u, 2u, 3u}) {
    const Mask m = Mask{}.with_flags(flags);
    expect(m.exact == (flags % 2 != 0) && m.sparse == (flags < 2) && m.flags() == flags, m, "flags %u", flags);
  }
}

void check_score() {
  const Mask none{};
  for (double scale : {1.0, 0.125, -0.7, 0.0})
    for (double cap : {0.0, 0.5, 30.0})
      for (double qk = -40; qk <= 40; qk += 0.37) {
        const Score<double> score{scale, cap};
        const auto apply = [&](double x) { return score.apply<Math>(x); };
        const double s = apply(qk), want = cap != 0 ? cap * std::tanh(scale * qk / cap) : scale * qk;
        expect(std::abs(s - want) <= 1e-12 * (1 + std::abs(want)), none, "score(%g) is %g, not %g", qk, s, want);
        const double step = 1e-5, slope = score.slope(s), risen = (apply(qk + step) - apply(qk - step)) / (2 * step);
        expect(std::abs(scale * slope - risen) <= 1e-6, none,
               "scale %g cap %g: slope at %g is %g, finite differences say %g", scale, cap, qk, scale * slope, risen);
        if (cap == 0) expect(slope == 1, none, "slope without softcap");
      }
}

// Every 16-bit float, and each rule alone.
void check_addend() {
  for (int bits = 0; bits < 65536; bits++) {
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    const double sign = bits >> 15 ? -1 : 1;
    const double finite = exponent ? std::ldexp(1024 + mantissa, exponent - 25) : std::ldexp(mantissa, -24);
    const double want = sign * (exponent < 31 ? finite : INFINITY), got = f16_to_float(static_cast<uint16_t>(bits));
    expect(exponent == 31 && mantissa ? std::isnan(got) : got == want, {}, "float16 %d is %g, not %g", bits, got, want);
  }
  const uint8_t mask[6] = {1, 0, 1, 1, 1, 0};
  const int32_t query_ids[2] = {4, -1}, key_ids[3] = {4, -1, 5};
  const double bias[3] = {0.5, -INFINITY, -1e300};
  const auto removed = [](double x) { return std::isinf(x) && x < 0; };
  const Addend<double> masks{.mask = mask, .mask_row = 3, .mask_col = 1};
  const Addend<double> ids{.query_ids = query_ids, .key_ids = key_ids};
  const Addend<float> biases{.bias = bias, .bias_col = 1, .bias_dtype = DType::kF64};  // shared by queries
  const Addend<double> slopes{.sloped = true, .slope = 0.25, .off = 2};
  for (int i = 0; i < 2; i++)
    for (int j = 0; j < 3; j++) {
      expect(removed(masks.at(i, j)) == !mask[i * 3 + j], {}, "mask at %d, %d", i, j);
      expect(removed(ids.at(i, j)) == !(i == 0 && j == 0), {}, "ids at %d, %d", i, j);
      const float x = biases.at(i, j);
      expect(j == 0 ? x == 0.5f : j == 1 ? removed(x) : x == -std::numeric_limits<float>::max(), {}, "bias at %d", j);
      expect(slopes.at(i, j) == -0.25 * std::abs(i + 2 - j), {}, "slope at %d, %d", i, j);
    }
  const int32_t positions[2] = {7, 1};
  const Addend<double> placed{.sloped = true, .slope = 0.5, .positions = positions, .off = 2};
  expect(placed.at(0, 3) == -2 && placed.at(1, 3) == -1, {}, "positions");
  expect(Addend<float>{}.at(1, 2) == 0, {}, "nothing");
}

// Philox against the known answers of the Random123 library; and which word of a block is whose.
void check_dropout() {
  const auto same = [](Philox a, Philox b) { return a.x == b.x && a.y == b.y && a.z == b.z && a.w == b.w; };
  const uint32_t most = 0xFFFFFFFFu;
  const Philox zeros{0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48};
  const Philox ones{0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662};
  const Philox pi{0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A};
  const auto block = [](Philox counter, uint32_t key0, uint32_t key1) {
    Philox two[2] = {{1, 2, 3, 4}, counter};
    Philox::blocks(two, key0, key1);
    return two[1];
  };
  expect(same(block({0, 0, 0, 0}, 0, 0), zeros) && same(block({most, most, most, most}, most, most), ones) &&
             same(block({0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344}, 0xA4093822, 0x299F31D0), pi),
         {}, "Philox");
  const uint32_t seed[2] = {7, 8};
  Philox several[3];  // the last one of them
  Dropout<float>::make(0.5, seed).words(17 - 4, 34 - 2, 2, 1, several);
  expect(same(several[2], block({17, 34, 0, 0}, 7, 8)), {}, "words");
  const uint32_t words[4] = {several[2].x, several[2].y, several[2].z, several[2].w};
  for (int x = 0; x < 4; x++)
    for (double rate : {0.1, 0.5, 0.9, 1 - 1e-12, words[x] * 0x1p-32, (words[x] + 1.0) * 0x1p-32}) {
      const auto dropout = Dropout<double>::make(rate, seed);
      const bool kept = words[x] >= std::floor(rate * 0x1p32 + 0.5);
      expect(dropout.factor(x & 2 ? 25 : 17, x & 1 ? 42 : 34) == (kept ? 1 / (1 - rate) : 0), {}, "word %d", x);
    }
  expect(!Dropout<float>::make(0, seed).present() && !Dropout<float>::make(0.5, nullptr).present() &&
             Dropout<float>::make(0, seed).factor(3, 4) == 1,
         {}, "no dropout");
}

// Packed sequences with gaps between them, rows that see nothing, windows: whatever is met is walked, whatever is walked
// bare is full, and the tiles of keys that add to a tile of queries are counted off one by one.
void sample_spans(int count) {
  std::mt19937 random(7);
  const auto draw = [&](int lo, int hi) { return std::uniform_int_distribution<int>(lo, hi)(random); };
  for (int sample = 0; sample < count; sample++) {
    const int T = draw(1, 24), S = draw(1, 24);
    std::vector<Range> rows(T, {0, 0});
    const int left = draw(0, 1) ? draw(0, 6) : kMaxLength, right = draw(0, 1) ? draw(0, 3) : kMaxLength;
    for (int i = 0, j = 0; i < T && j < S;) {  // a sequence, then a gap
      const int i1 = std::min(T, i + draw(0, 8)), j1 = std::min(S, j + draw(0, 8)), off = draw(0, 1) ? j1 - i1 : j - i;
      for (int r = i; r < i1; r++) {
        rows[r] = {clamp_(r + off - std::min(left, 100), j, j1), clamp_(r + off + std::min(right, 100) + 1, j, j1)};
      }
      const int gap_i = std::min(T, i1 + draw(0, 2)), gap_j = std::min(S, j1 + draw(0, 2));
      for (int r = i1; r < gap_i; r++) rows[r] = {j1, j1};
      for (int r = gap_i; r < T; r++) rows[r] = {gap_j, gap_j};
      i = gap_i, j = std::max(gap_j, j + (i1 == i));
    }
    std::vector<Span> key_spans, query_spans;
    for (const Range& r : rows) key_spans.push_back({r.begin < r.end ? r.begin : ~r.begin, r.end});
    for (int j = 0, past = 0; j < S; j++) {
      int begin = -1, end = 0;
      for (int i = 0; i < T; i++)
        if (rows[i].has(j)) begin = begin < 0 ? i : begin, end = i + 1;
      past = begin < 0 ? past : std::max(past, end);
      query_spans.push_back(begin < 0 ? Span{~past, past} : Span{begin, end});
    }
    Mask m{.q_len = T, .k_len = S, .left = kMaxLength, .right = kMaxLength, .off = 0};
    m.key_spans = key_spans.data(), m.query_spans = query_spans.data();
    const Table t(m, T, S);
    for (int i = 0; i < T; i++) {
      expect(m.live_queries().has(i) == t.row_live(i), m, "spans: live query %d", i);
      for (int j = 0; j < S; j++) {
        expect(t.at(i, j) == rows[i].has(j) && m.keys(i).has(j) == t.at(i, j) && m.queries(j).has(i) == t.at(i, j) &&
                   m.span_of_query(i).range().has(j) == t.at(i, j),
               m, "spans: %d, %d", i, j);
      }
    }
    for (int j = 0; j < S; j++) expect(m.live_keys().has(j) == t.col_live(j), m, "spans: live key %d", j);
    expect(!m.live_queries().has(T) && m.keys(T).end == 0 && m.queries(S).end == 0, m, "spans: past the end");
    const std::vector<char> every(T, 1);
    for (bool exact : {true, false}) {
      m.exact = exact;
      for (int size = 1; size <= 4; size++)
        for (int wide = 1; wide <= 5; wide++) {
          // any and full say what the table says of one tile of `size`.
          const auto covers = [&](const Tiles& met, int length, const char* which, int x0, auto any, auto full) {
            for (int tile = 0; tile * size < length; tile++) {
              const bool in = met.begin <= tile && tile < met.end, bare = met.full_begin <= tile && tile < met.full_end;
              expect(in || !any(tile * size), m, "spans: %s tile %d of %d+%d is missed", which, tile, x0, wide);
              expect(!bare || (exact && in && full(tile * size)), m, "spans: %s tile %d", which, tile);
            }
          };
          for (int i0 = 0; i0 < T; i0 += wide) {
            const int i1 = std::min(T, i0 + wide);
            covers(
                m.key_tiles(i0, i0 + wide, size), S, "key", i0, [&](int j0) { return t.any(i0, i1, j0, j0 + size); },
                [&](int j0) { return t.full(i0, i1, j0, j0 + size, every); });
          }
          for (int j0 = 0; j0 < S; j0 += wide) {
            covers(
                m.query_tiles(j0, j0 + wide, size), T, "query", j0,
                [&](int i0) { return t.any(i0, std::min(T, i0 + size), j0, j0 + wide); },
                [&](int i0) { return t.full(i0, std::min(T, i0 + size), j0, j0 + wide, every); });
          }
          for (int tile = 0; tile * size < T; tile++)
            for (bool descending : {false, true}) {
              std::vector<int> turns;  // of the key tiles that come here, first to last
              const int tiles = (S + wide - 1) / wide;
              for (int x = 0; x < tiles; x++) {
                const int key_tile = descending ? tiles - 1 - x : x;
                const Tiles met = m.query_tiles(key_tile * wide, key_tile * wide + wide, size);
                if (met.begin > tile || tile >= met.end) continue;
                const int before = m.key_tiles_before(key_tile, tile, size, wide, descending);
                expect(before == int(turns.size()), m, "spans: key tile %d is %d-th at %d", key_tile, before, tile);
                turns.push_back(key_tile);
              }
            }
        }
    }
  }
}

void check_problem() {
  Problem p{};
  const int32_t sizes[kMaxBatchAxes] = {2, 1, 3, 5};
  std::copy(sizes, sizes + kMaxBatchAxes, p.batch_sizes);
  p.B = 30, p.T = 7, p.S = 9, p.N = 6, p.K = 2;
  const Mask none{};
  int b = 0;
  for (int x = 0; x < 2; x++)
    for (int y = 0; y < 3; y++)
      for (int z = 0; z < 5; z++, b++) {
        const Batch at = p.batch(b);
        expect(at.at[0] == x && at.at[1] == 0 && at.at[2] == y && at.at[3] == z, none, "coordinates of batch row %d",
               b);
      }
  expect(p.group() == 3, none, "group");

  // Lengths that vary along the last batch axis only, some of them nonsense.
  int32_t lengths[5] = {-4, 0, 3, 9, 1 << 30};
  p.extras.key_lens.data = lengths, p.extras.key_lens.batch[3] = 1;
  const int want[5] = {0, 0, 3, 9, 9};
  for (b = 0; b < p.B; b++) {
    const Mask m = p.mask(p.batch(b));
    expect(m.k_len == want[b % 5] && m.q_len == 7, m, "clamped key length of batch row %d", b);
  }
  p.spec.bottom_right = true, p.extras.query_lens = p.extras.key_lens;
  const Mask m = p.mask(p.batch(3));
  expect(m.q_len == 7 && m.off == 2, m, "the diagonal moves by clamped lengths");

  float cells[64];
  const Tensor tensor{.data = cells, .batch = {32, 0, 8, 1}, .head = 5};
  expect(tensor.at<float>(p.batch(29), 2) == cells + 32 + 16 + 4 + 10, none, "address of (batch row, head)");

  p.extras = {}, p.spec = {};
  expect(p.body() == Body::kPlain, none, "defaults are plain");
  p.spec.softcap = 1;
  expect(p.body() == Body::kGeneral && !p.elementwise(), none, "a softcap is not");
  p.spec = {};
  for (Tensor* operand :
       {&p.extras.mask, &p.extras.query_ids, &p.extras.bias, &p.extras.alibi_slopes, &p.extras.seeds}) {
    operand->data = cells;
    expect(p.body() == (p.removes_pairs() ? Body::kRemoving : Body::kGeneral) && (p.elementwise() || p.removes_pairs()),
           none, "nor is what operands do to pairs");
    operand->data = nullptr;
  }
  p.extras.key_spans.data = cells;
  expect(p.body() == Body::kSpans, none, "spans alone remove nothing from each other");
  p.extras.key_spans.data = nullptr, p.extras.sinks.data = cells;
  expect(p.body() == Body::kPlain, none, "a sink is no matter of pairs");
  p.extras.sinks.data = nullptr;
  p.extras.bias = {.data = cells, .batch = {0, 0, 0, 9}, .row = 9, .head = 0, .col = 1};
  expect(p.bias_is_shared(), none, "a bias that batch rows and heads share");
  const Tensor own{.data = cells, .batch = {15, 0, 5, 1}, .row = 1, .head = 1, .col = 1};
  p.extras.bias = own;
  expect(!p.bias_is_shared(), none, "a bias of each pair's own");
}

// Every tile of every head has one ticket, and one turn of one block.
void check_schedule() {
  using cuda::sm90::Schedule;
  for (uint32_t tiles : {1u, 2u, 3u, 7u, 86u})
    for (uint32_t heads : {1u, 4u, 24u, 100u})
      for (uint32_t section : {1u, 4u, 16u})
        for (uint32_t workers : {1u, 4u, 132u}) {
          if (section > heads) continue;
          const bool even = (tiles + heads) % 2 == 0;
          const Schedule s{tiles, heads, section, std::min(workers, tiles * heads), even};
          std::vector<int> met(tiles * heads), turns(tiles * heads);
          for (uint32_t ticket = 0; ticket < s.tickets(); ticket++) {
            const Schedule::Place place = s.place(ticket);
            expect(place.tile >= 0 && place.tile < int(tiles) && place.head >= 0 && place.head < int(heads), {},
                   "ticket %u of %u x %u leads outside", ticket, tiles, heads);
            met[place.head * tiles + place.tile]++;
          }
          for (uint32_t block = 0; block < s.workers; block++)
            for (uint32_t ticket = block, turn = 0; ticket < s.tickets(); ticket = s.turn_of(block, ++turn))
              turns[ticket]++;
          const auto once = [](int n) { return n == 1; };
          expect(std::all_of(met.begin(), met.end(), once) && std::all_of(turns.begin(), turns.end(), once), {},
                 "schedule of %u x %u, section %u, workers %u", tiles, heads, section, s.workers);
        }
}

// Every tile of a pack comes once, and of each sequence they come in order, one of each in turn.
void check_sequences() {
  using cuda::sm90::Sequences;
  for (uint32_t tiles : {1u, 2u, 7u, 86u, 128u})
    for (int64_t count : {0, 1, 2, 5, 16, 127, 200}) {
      const Sequences s = Sequences::of(tiles, count);
      std::vector<int> met(tiles);
      for (uint32_t x = 0; x < tiles; x++) {
        const uint32_t tile = s.tile(x);
        expect(tile < tiles && (x < s.count || tile == s.tile(x - s.count) + 1), {}, "tile %u of %u in %u sequences", x,
               tiles, s.count);
        if (tile < tiles) met[tile]++;
      }
      expect(std::all_of(met.begin(), met.end(), [](int n) { return n == 1; }), {}, "%u tiles in %u sequences", tiles,
             s.count);
    }
  Problem p{};
  p.S = 16384;
  expect(Sequences::make(p, 128).count == 1, {}, "what is no pack is one sequence");
  int32_t cells[2] = {};
  p.extras.key_spans = {.data = cells}, p.extras.query_spans = {.data = cells};
  expect(Sequences::make(p, 128).count == 1, {}, "nor is one of which nobody knows more");
  p.spec.longest_span = 1000;
  expect(Sequences::make(p, 128).count == 16 && Sequences::make(p, 9).count == 9, {}, "as many as have room");
  p.spec.longest_span = kMaxLength;
  expect(Sequences::make(p, 128).count == 1, {}, "one at least");
}

// Every tile of every head is a step of one block's list, and each unit of a list ends once, with its last tile.
void check_fixed_lists() {
  using cuda::sm90::FixedLists;
  for (uint32_t tiles : {1u, 2u, 3u, 7u, 86u})
    for (uint32_t heads : {1u, 4u, 24u, 100u})
      for (uint32_t resident : {1u, 4u, 132u})
        for (int kind = 0; kind < 4; kind++) {
          const bool even = kind % 2, together = kind / 2;
          const FixedLists lists = FixedLists::make(tiles, heads, even, resident, together);
          std::vector<int> met(tiles * heads);
          uint32_t ends = 0;
          for (uint32_t block = 0; block < lists.blocks(); block++) {
            uint32_t last = 0;
            for (int step = 0; step < lists.steps(block); step++) {
              const FixedLists::Place at = lists.place(block, step);
              if (at.tile < 0) continue;
              met[at.head * tiles + at.tile]++, last = at.ends_unit, ends += at.ends_unit;
            }
            expect(last == 1 || !together, {}, "a list of %u x %u does not end with its last unit", tiles, heads);
          }
          const auto once = [](int n) { return n == 1; };
          expect(std::all_of(met.begin(), met.end(), once), {}, "lists of %u x %u for %u", tiles, heads, resident);
          if (together)
            expect(lists.blocks() <= resident && ends == lists.units(), {}, "units of %u x %u", tiles, heads);
        }
}

// Whether warps that draw chores, and blocks that draw the tiles between them, come to an end where each in turn does what it
// can, or waits for others. Of a chore the first half never waits.
bool chores_end(const cuda::sm90::ChoreQueue& queue, uint32_t of_head, uint32_t workers) {
  const uint32_t heads = queue.units / of_head;
  std::mt19937 random(17);
  std::vector<uint32_t> prepared(heads), added(heads), tile(workers), chore(workers);
  std::vector<bool> has_tile(workers), waits(workers);
  uint32_t tiles = 0, chores = 0, converted = 0, idle = 0;
  while (converted < queue.units && idle < 1000 * workers) {
    const uint32_t w = random() % workers;
    idle++;
    if (random() % 2) {
      if (!has_tile[w] && tiles < queue.units) tile[w] = tiles++, has_tile[w] = true;
      const uint32_t head = tile[w] / of_head;
      if (has_tile[w] && prepared[head] == of_head) added[head]++, has_tile[w] = false, idle = 0;
    } else {
      if (!waits[w] && chores < queue.size()) {
        chore[w] = chores++, waits[w] = chore[w] >= queue.ahead, idle = 0;
        if (chore[w] < queue.units) prepared[chore[w] / of_head]++;
      }
      if (waits[w] && added[(chore[w] - queue.ahead) / of_head] == of_head) converted++, waits[w] = false, idle = 0;
    }
  }
  return converted == queue.units;
}

void check_chores() {
  using cuda::sm90::ChoreQueue;
  for (uint32_t of_head : {1u, 2u, 7u, 40u})
    for (uint32_t heads : {1u, 3u, 11u})
      for (uint32_t workers : {1u, 3u, 9u})
        for (const uint32_t units = of_head * heads;
             const ChoreQueue& queue : {ChoreQueue{units, of_head}, ChoreQueue::make(units, of_head, workers)})
          expect(chores_end(queue, of_head, workers), {}, "chores of %u heads of %u by %u, %u ahead", heads, of_head,
                 workers, queue.ahead);
  expect(!chores_end({21, 0}, 7, 3), {}, "chores that are not ahead must wait for each other");
}

}  // namespace

#if defined(__CUDACC__)
// Never launched: that it compiles shows that device code reads the laws.
__global__ void read_laws(Problem p, int* ints, float* floats) {
  const Batch b = p.batch(blockIdx.x);
  const Mask m = p.mask(b);
  const Tiles k = m.key_tiles(0, 64, 64), q = m.query_tiles(0, 64, 64);
  const Range ranges[4] = {m.keys(threadIdx.x), m.queries(threadIdx.x), m.live_queries(), m.live_keys()};
  ints[threadIdx.x] = k.begin + k.full_begin + k.full_end + k.end + q.begin + q.full_begin + q.full_end + q.end;
  for (const Range& r : ranges) ints[threadIdx.x] += r.begin + r.end + m.visible(r.begin, r.end);
  const float s = p.score<float>(b, 0).apply<Math>(floats[threadIdx.x]);
  floats[threadIdx.x] = s * p.score<float>(b, 0).slope(s);
  floats[threadIdx.x] += p.addend<float>(b, 0, m).at(0, 0) * p.dropout<float>(b, 0).factor(0, 0);
}
#endif

}  // namespace jax_flash2

int main() {
  using namespace jax_flash2;
  exhaust_masks(7);
  check_schedule();
  check_sequences();
  check_fixed_lists();
  check_chores();
  sample_masks(300);
  check_make();
  check_flags();
  check_score();
  check_addend();
  sample_spans(400);
  check_dropout();
  check_problem();
  std::printf("laws: %ld checks, %ld failed\n", checks, failures);
  return failures != 0;
}
