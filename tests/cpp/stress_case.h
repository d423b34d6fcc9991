// Random cases for stress.cu: what a seed stands for, and how it reads in print. Knows shapes and options, no memory
// and no kernel; shares no law with src/core.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

namespace stress {

class Random {
 public:
  // Hashed first: the state only counts, so the streams of neighbouring seeds would be each other's, shifted by one.
  explicit Random(uint64_t seed) : state_(seed) { state_ = next() ^ (next() << 1); }
  uint64_t next() {  // splitmix64
    uint64_t z = (state_ += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull, z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
  double uniform() { return double(next() >> 11) * 0x1p-53; }
  bool chance(double p) { return uniform() < p; }
  int within(int lo, int hi) { return lo + int(next() % uint64_t(hi - lo + 1)); }  // both ends
  template <class T>
  T of(std::initializer_list<T> list) {
    return list.begin()[next() % list.size()];
  }

 private:
  uint64_t state_;
};

// How keys are multiplied over their positions.
enum class Data : int {
  normal,
  rising,   // later keys give larger scores, up to hundreds: the last tile read first holds the largest
  falling,  // earlier keys do: scores grow with every tile, beyond 2^127 in all
  jump,     // one stretch of 32 keys towers over the rest
  zero,
};

// Who sees whom beside windows and lengths, see stress_pairs.h.
enum class Pairs : int { none, packed, documents, ids, mask };

// Which axes a tensor varies along, and how it lies in memory.
struct Placement {
  bool heads_first = false;               // [B, heads, length, D], else [B, length, heads, D]
  bool shared0 = false, shared1 = false;  // stride 0 along a batch axis
  int pad_inner = 0, pad_outer = 0;       // unused elements behind each row of memory, behind each outer one
};

struct Case {
  uint64_t seed = 0;
  bool bf16 = true;
  int B0 = 1, B1 = 1, T = 1, S = 1, N = 1, K = 1, D = 64, Dv = 64;
  int64_t left = -1, right = -1;
  bool bottom_right = false, q_lens = false, k_lens = false, traced = false, poison = false;
  bool deterministic = false, dlse = false, queue = true;
  double scale = 1, softcap = 0;
  Data data = Data::normal;
  Pairs pairs = Pairs::none;
  int64_t packed_left = -1, packed_right = -1;  // the window of packed sequences, in place of the call's
  bool packed_bottom_right = false;
  Placement q, k, v, out;
  std::vector<int> query_lens, key_lens;  // of each batch row, out of range too
  std::vector<float> scales;

  int B() const { return B0 * B1; }
  bool shares() const { return q.shared0 || q.shared1 || k.shared0 || k.shared1 || v.shared0 || v.shared1; }

  std::string text() const {
    char s[320];
    std::snprintf(s, sizeof s, "seed %llu: %s B%dx%d T%d S%d N%d/%d D%d/%d scale %g softcap %g window %lld,%lld%s",
                  static_cast<unsigned long long>(seed), bf16 ? "bf16" : "f16", B0, B1, T, S, N, K, D, Dv, scale,
                  softcap, static_cast<long long>(left), static_cast<long long>(right),
                  bottom_right ? " bottom_right" : "");
    std::string r = s;
    const auto flag = [&](bool f, const char* what) { r += f ? std::string(" ") + what : ""; };
    flag(q_lens, "query_lens"), flag(k_lens, "key_lens"), flag(traced, "traced_scale"),
        flag(poison, "nan_where_unread");
    flag(deterministic, "deterministic"), flag(dlse, "dlse"), flag(!queue, "no_queue");
    const char* const kinds[] = {"normal", "rising", "falling", "jump", "zero"};
    const char* const who[] = {"", " packed", " documents", " ids", " mask"};
    r += who[int(pairs)];
    if (pairs == Pairs::packed) {
      std::snprintf(s, sizeof s, " of window %lld,%lld%s", static_cast<long long>(packed_left),
                    static_cast<long long>(packed_right), packed_bottom_right ? " bottom_right" : "");
      r += s;
    }
    r += std::string(" data ") + kinds[int(data)];
    const Placement* const all[] = {&q, &k, &v, &out};
    for (int x = 0; x < 4; x++) {
      const Placement& p = *all[x];
      std::snprintf(s, sizeof s, " %s:%s%s%s+%d+%d", (const char* const[]){"q", "k", "v", "out"}[x],
                    p.heads_first ? "BNTD" : "BTND", p.shared0 ? "/shared0" : "", p.shared1 ? "/shared1" : "",
                    p.pad_inner, p.pad_outer);
      r += s;
    }
    for (int b = 0; b < B() && b < 8 && (q_lens || k_lens); b++) {
      std::snprintf(s, sizeof s, " lens[%d] %d,%d", b, q_lens ? query_lens[b] : T, k_lens ? key_lens[b] : S);
      r += s;
    }
    return r;
  }
};

// Lengths: mostly small and at the edges of tiles, some of thousands.
inline int draw_length(Random& r, bool large) {
  switch (r.within(0, large ? 5 : 3)) {
    case 0: return r.within(1, 16);
    case 1: return std::max(1, r.of({64, 80, 96, 128, 176, 192, 256, 384, 512}) + r.within(-2, 2));
    case 2: return r.within(1, 300);
    case 3: return r.within(1, 700);
    case 4: return r.within(700, 2100);
    default: return r.of({1000, 1024, 1023, 1025, 2048, 3000, 4096});
  }
}

inline Placement draw_placement(Random& r, bool may_share) {
  Placement p;
  p.heads_first = r.chance(0.4);
  p.shared0 = may_share && r.chance(0.5), p.shared1 = may_share && r.chance(0.5);
  if (r.chance(0.25)) p.pad_inner = 8 * r.within(1, 5);
  if (r.chance(0.25)) p.pad_outer = 8 * r.within(1, 9);
  return p;
}

struct Options {
  std::vector<int> dims;   // empty: any
  double most_work = 3e8;  // B N T S D of a case, ten times as much of one in twenty
};

inline Case draw(uint64_t seed, const Options& options) {
  Random r(seed);
  Case c;
  c.seed = seed;
  c.bf16 = r.chance(0.5);
  const bool large = r.chance(0.25);
  const int any_dim = r.chance(0.7) ? r.of({64, 128, 256, 96, 192}) : 8 * r.within(1, 32);
  c.D = options.dims.empty() ? any_dim : options.dims[r.next() % options.dims.size()];
  c.Dv = c.D;
  if (r.chance(0.3)) c.Dv = r.chance(0.5) && c.D >= 192 ? 128 : 8 * r.within(1, options.dims.empty() ? 32 : c.D / 8);
  c.T = r.chance(0.08) ? 1 : draw_length(r, large);
  c.S = r.chance(0.04) ? 1 : r.chance(0.02) ? 0 : r.chance(0.4) ? c.T : draw_length(r, large);
  c.K = r.within(1, 4);
  c.N = c.K * r.of({1, 1, 1, 2, 3, 4, 6, 8});
  c.B0 = r.within(1, 3), c.B1 = r.chance(0.3) ? r.within(2, 3) : 1;
  if (r.chance(0.02)) c.B0 = 1, c.B1 = 300, c.N = 2, c.K = 1 + r.within(0, 1), c.T = r.within(1, 70);  // many heads
  const double most = options.most_work * (r.chance(0.05) ? 10 : 1);
  const auto work = [&] { return double(c.B()) * c.N * std::max(32, c.T) * std::max(32, c.S) * c.D; };
  while (work() > most && c.B1 > 1) c.B1--;
  while (work() > most && c.B0 > 1) c.B0--;
  while (work() > most && c.N > c.K) c.N -= c.K;
  while (work() > most && c.K > 1) c.N = c.N / c.K * (c.K - 1), c.K--;
  while (work() > most && std::max(c.T, c.S) > 32) (c.T > c.S ? c.T : c.S) = std::max(c.T, c.S) * 2 / 3;

  const int longest = std::max(c.T, c.S);
  const auto side = [&] { return r.chance(0.5) ? r.within(0, 40) : r.within(0, longest + 10); };
  switch (r.within(0, 5)) {
    case 0: break;
    case 1: break;
    case 2: c.right = 0; break;
    case 3: c.right = 0, c.left = r.chance(0.4) ? side() : -1; break;
    case 4: c.left = side(), c.right = side(); break;
    default: (r.chance(0.5) ? c.left : c.right) = side();
  }
  c.bottom_right = r.chance(0.5);
  c.q_lens = r.chance(0.2), c.k_lens = r.chance(0.25);
  for (int b = 0; b < c.B(); b++) {
    const auto length = [&](int full) {
      return r.chance(0.15) ? r.of({0, -3, full + 7, full, 1}) : r.within(0, std::max(0, full));
    };
    c.query_lens.push_back(length(c.T)), c.key_lens.push_back(length(c.S));
  }
  c.scale = 1 / std::sqrt(double(c.D));
  if (r.chance(0.25)) c.scale *= r.of({-1.0, 0.0, 3.0, -3.0, 0.01, 20.0, 1e-6});
  c.traced = r.chance(0.12);
  for (int b = 0; b < c.B(); b++) c.scales.push_back(float(c.scale * r.of({1.0, -1.0, 0.0, 2.0, 0.3})));
  if (r.chance(0.15)) c.softcap = r.of({0.5, 5.0, 30.0, 50.0});
  c.poison = r.chance(0.4);
  c.deterministic = r.chance(0.25), c.dlse = r.chance(0.3);
  if (r.chance(0.35)) c.data = r.of({Data::rising, Data::falling, Data::jump, Data::zero});
  const bool may_share = r.chance(0.15);
  c.q = draw_placement(r, may_share), c.k = draw_placement(r, may_share), c.v = draw_placement(r, may_share);
  c.out = draw_placement(r, false);
  if (c.shares()) c.poison = false;
  c.queue = r.chance(0.85);
  if (r.chance(0.35) && double(c.B()) * c.T * c.S < 6e6) {
    c.pairs = r.of({Pairs::packed, Pairs::packed, Pairs::documents, Pairs::ids, Pairs::mask});
    if (c.pairs == Pairs::packed) {
      std::swap(c.left, c.packed_left), std::swap(c.right, c.packed_right);
      std::swap(c.bottom_right, c.packed_bottom_right);
      c.q_lens = c.k_lens = false;
    }
  }
  return c;
}

}  // namespace stress
