// Cases for the standalone kernel tests, their inputs, and the truth in float64 by the definition. Shares no law with
// src/core: who sees whom and what a score is are written here again, as the documentation words them.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <thread>
#include <vector>

namespace cases {

enum class Type { bf16, f16 };

// ---- 16-bit floats by hand, so that host code needs no CUDA type ----
inline float bits_to_float(uint32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
inline uint32_t float_to_bits(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return u;
}
inline float decode(Type type, uint16_t h) {
  if (type == Type::bf16) return bits_to_float(uint32_t(h) << 16);
  const int exponent = h >> 10 & 31, mantissa = h & 1023;
  const float sign = h & 0x8000 ? -1.0f : 1.0f;
  if (exponent == 31) return mantissa ? std::numeric_limits<float>::quiet_NaN() : sign * INFINITY;
  return sign * (exponent ? std::ldexp(1024.0f + mantissa, exponent - 25) : std::ldexp(float(mantissa), -24));
}
inline uint16_t encode(Type type, float x) {
  if (std::isnan(x)) return 0x7fff;
  if (type == Type::bf16) {
    const uint32_t u = float_to_bits(x);
    return uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16);
  }
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const float a = std::fabs(x);
  if (a >= 65520.0f) return sign | 0x7c00;
  int e = a > 0 ? std::max(std::ilogb(a), -14) : -14;
  float m = std::nearbyint(std::ldexp(a, 10 - e));  // in units of 2^(e - 10); 2048 carries into the exponent
  return uint16_t(sign | (uint32_t(m) + (m >= 1024.0f ? uint32_t(e + 14) << 10 : 0)));
}

// ---- a case ----
enum class Data {
  normal,
  nan_dead,  // NaN wherever nobody may look
  rising,    // later keys give ever larger scores, up to hundreds
  falling,   // earlier keys do
  huge,      // scores about 1e11: one key wins, exactly
};

struct Case {
  std::string name;
  Type type = Type::bf16;
  int B = 1, T = 64, S = 64, N = 1, K = 1, D = 64;
  double scale = NAN;  // NaN: 1 / sqrt(D)
  double softcap = 0;
  int64_t left = -1, right = -1;  // -1: open
  bool bottom_right = false;
  std::vector<int> query_lens, key_lens;  // per batch row; empty: full
  std::vector<float> traced_scale;        // per batch row; empty: `scale`
  Data data = Data::normal;
  int pad = 0;             // unused elements after each row of every tensor
  bool shared_kv = false;  // K and V have no batch axis
  bool two_axes = false;   // batch axes [2, B / 2]

  int group() const { return N / K; }
  int query_len(int b) const { return query_lens.empty() ? T : std::clamp(query_lens[b], 0, T); }
  int key_len(int b) const { return key_lens.empty() ? S : std::clamp(key_lens[b], 0, S); }
  float scale_of(int b) const {
    if (!traced_scale.empty()) return traced_scale[b];
    return float(std::isnan(scale) ? 1.0 / std::sqrt(double(D)) : scale);
  }
  bool sees(int b, int i, int j) const {
    if (i >= query_len(b) || j >= key_len(b)) return false;
    const int64_t position = int64_t(i) + (bottom_right ? key_len(b) - query_len(b) : 0);
    return (left < 0 || j >= position - left) && (right < 0 || j <= position + right);
  }
  double work() const { return double(B) * N * T * S * D; }
};

// ---- inputs: raw 16-bit tensors [B, length, heads, D] with `pad` elements after each row ----
struct Tensor16 {
  Type type;
  int B, length, heads, D, row;  // row: stride of a row in elements
  std::vector<uint16_t> raw;

  Tensor16(const Case& c, int batch, int length, int heads)
      : type(c.type),
        B(batch),
        length(length),
        heads(heads),
        D(c.D),
        row(heads * c.D + c.pad),
        raw(size_t(batch) * length * row, 0xffff) {}
  size_t index(int b, int i, int h, int d = 0) const { return (size_t(b) * length + i) * row + size_t(h) * D + d; }
  float get(int b, int i, int h, int d) const { return decode(type, raw[index(b, i, h, d)]); }
  void set(int b, int i, int h, int d, float x) { raw[index(b, i, h, d)] = encode(type, x); }
};

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15ull + 1) {}
  double uniform() {  // (0, 1]
    uint64_t z = (state_ += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull, z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return ((z ^ (z >> 31)) >> 11) * 0x1p-53 + 0x1p-54;
  }
  float normal() { return float(std::sqrt(-2 * std::log(uniform())) * std::cos(6.283185307179586 * uniform())); }

 private:
  uint64_t state_;
};

struct Inputs {
  Tensor16 q, k, v;
  explicit Inputs(const Case& c, uint64_t seed = 1) : q(c, c.B, c.T, c.N), k(c, c.shared_kv ? 1 : c.B, c.S, c.K), v(k) {
    Random random(seed);
    const float huge = c.data == Data::huge ? 1e5f : 1.0f;
    for (int b = 0; b < c.B; b++)
      for (int i = 0; i < c.T; i++)
        for (int n = 0; n < c.N; n++)
          for (int d = 0; d < c.D; d++) q.set(b, i, n, d, random.normal() * huge);
    for (int b = 0; b < k.B; b++)
      for (int j = 0; j < c.S; j++)
        for (int h = 0; h < c.K; h++)
          for (int d = 0; d < c.D; d++) {
            const float at = float(c.data == Data::rising ? j : c.S - j) / float(c.S);
            const bool ramp = c.data == Data::rising || c.data == Data::falling;
            k.set(b, j, h, d, random.normal() * (ramp ? 0.1f + 60.0f * at * at : huge));
            v.set(b, j, h, d, random.normal());
          }
    if (c.data == Data::nan_dead) {
      for (int b = 0; b < c.B; b++) {
        for (int i = 0; i < c.T; i++) {
          bool live = false;
          for (int j = 0; j < c.S; j++) live |= c.sees(b, i, j);
          for (int x = 0; !live && x < c.N * c.D; x++) q.set(b, i, x / c.D, x % c.D, NAN);
        }
        for (int j = 0; j < c.S && !c.shared_kv; j++) {
          bool live = false;
          for (int i = 0; i < c.T; i++) live |= c.sees(b, i, j);
          for (int x = 0; !live && x < c.K * c.D; x++)
            k.set(b, j, x / c.D, x % c.D, NAN), v.set(b, j, x / c.D, x % c.D, x & 1 ? NAN : INFINITY);
        }
      }
    }
  }
};

// ---- the truth ----
template <class F>
void parallel(int64_t n, F f) {
  const int workers = std::clamp<int>(int(std::thread::hardware_concurrency()), 1, 16);
  std::vector<std::thread> threads;
  for (int w = 0; w < workers; w++)
    threads.emplace_back([=] {
      for (int64_t x = w; x < n; x += workers) f(x);
    });
  for (std::thread& t : threads) t.join();
}

// Indexed [B, N, T] and [B, N, T, D]. `spread` is what independent roundings of the probabilities to one unit in the
// last place of the dtype, and of the output, add up to (root of the sum of squares), `lse_error` what float32 scores
// may cost.
struct Truth {
  std::vector<double> out, spread, lse, lse_error;
};

inline Truth forward_truth(const Case& c, const Inputs& in) {
  const size_t rows = size_t(c.B) * c.N * c.T;
  Truth t{std::vector<double>(rows * c.D), std::vector<double>(rows * c.D), std::vector<double>(rows, -INFINITY),
          std::vector<double>(rows)};
  const double unit = c.type == Type::bf16 ? 0x1p-9 : 0x1p-12;  // relative error of one rounding
  parallel(int64_t(rows), [&, unit](int64_t row) {
    const int i = int(row % c.T), n = int(row / c.T % c.N), b = int(row / c.T / c.N), h = n / c.group();
    const int kb = c.shared_kv ? 0 : b;
    std::vector<double> s(c.S, -INFINITY), q(c.D), magnitude(1, 0);
    for (int d = 0; d < c.D; d++) q[d] = in.q.get(b, i, n, d);
    double top = -INFINITY, largest = 0, sum = 0;
    for (int j = 0; j < c.S; j++) {
      if (!c.sees(b, i, j)) continue;
      double dot = 0, absolute = 0;
      for (int d = 0; d < c.D; d++) {
        const double x = q[d] * in.k.get(kb, j, h, d);
        dot += x, absolute += std::fabs(x);
      }
      s[j] = double(c.scale_of(b)) * dot;
      if (c.softcap > 0) s[j] = c.softcap * std::tanh(s[j] / c.softcap);
      top = std::max(top, s[j]);
      largest = std::max(largest, absolute * std::fabs(double(c.scale_of(b))));
    }
    if (top == -INFINITY) return;
    for (int j = 0; j < c.S; j++) sum += s[j] == -INFINITY ? 0 : std::exp(s[j] - top);
    t.lse[row] = top + std::log(sum);
    t.lse_error[row] = 4e-6 + 1e-6 * largest + 4e-7 * c.softcap;
    std::vector<double> squares(c.D);
    double* out = &t.out[row * c.D];
    for (int j = 0; j < c.S; j++) {
      if (s[j] == -INFINITY) continue;
      const double p = std::exp(s[j] - top) / sum;
      if (p < 1e-12) continue;
      for (int d = 0; d < c.D; d++) {
        const double x = p * in.v.get(kb, j, h, d);
        out[d] += x, squares[d] += x * x;
      }
    }
    for (int d = 0; d < c.D; d++) t.spread[row * c.D + d] = unit * std::sqrt(squares[d] + out[d] * out[d]);
  });
  return t;
}

// ---- the list ----
inline std::vector<Case> all() {
  std::vector<Case> list;
  const auto add = [&](Case c) {
    c.name += std::string(c.type == Type::bf16 ? " bf16" : " f16") + " B" + std::to_string(c.B) + " T" +
              std::to_string(c.T) + " S" + std::to_string(c.S) + " N" + std::to_string(c.N) + "/" +
              std::to_string(c.K) + " D" + std::to_string(c.D);
    list.push_back(c);
  };
  const auto type = [&] { return list.size() % 2 ? Type::f16 : Type::bf16; };
  // Lengths round the edges of every tile, under every kind of bound.
  for (int T : {1, 7, 63, 64, 65, 129, 1000})
    for (int S : {1, 7, 63, 64, 65, 129, 1000}) switch (list.size() % 4) {
        case 0: add({.name = "full", .type = type(), .T = T, .S = S, .N = 2}); break;
        case 1: add({.name = "causal top-left", .type = type(), .T = T, .S = S, .N = 2, .right = 0}); break;
        case 2:
          add({.name = "causal bottom-right",
               .type = type(),
               .T = T,
               .S = S,
               .N = 2,
               .right = 0,
               .bottom_right = true});
          break;
        case 3:
          add({.name = "window 20, 33",
               .type = type(),
               .T = T,
               .S = S,
               .N = 2,
               .left = 20,
               .right = 33,
               .bottom_right = true});
      }
  // Every head dim instance, whole and cut short.
  for (int D : {8, 40, 64, 72, 80, 96, 104, 128, 152, 192, 200, 256})
    for (Type t : {Type::bf16, Type::f16}) {
      add({.name = "full", .type = t, .B = 2, .T = 129, .S = 200, .N = 4, .K = 2, .D = D});
      add({.name = "causal bottom-right",
           .type = t,
           .B = 2,
           .T = 200,
           .S = 329,
           .N = 4,
           .K = 2,
           .D = D,
           .right = 0,
           .bottom_right = true});
      add({.name = "window 70, 9",
           .type = t,
           .B = 2,
           .T = 130,
           .S = 200,
           .N = 4,
           .K = 2,
           .D = D,
           .left = 70,
           .right = 9});
      add({.name = "softcap",
           .type = t,
           .B = 2,
           .T = 130,
           .S = 129,
           .N = 2,
           .D = D,
           .scale = 2,
           .softcap = 30,
           .right = 0});
    }
  for (int D : {64, 96, 128, 192, 256}) {
    const std::vector<int> q_lens{0, 100, 999, 150, 64}, k_lens{70, 0, 31, 999, 128};
    add({.name = "lengths",
         .type = type(),
         .B = 5,
         .T = 150,
         .S = 140,
         .N = 2,
         .D = D,
         .query_lens = q_lens,
         .key_lens = k_lens,
         .data = Data::nan_dead});
    add({.name = "lengths causal",
         .type = type(),
         .B = 5,
         .T = 150,
         .S = 140,
         .N = 2,
         .D = D,
         .right = 0,
         .bottom_right = true,
         .query_lens = q_lens,
         .key_lens = k_lens,
         .data = Data::nan_dead});
    add({.name = "lengths window 30, 0",
         .type = type(),
         .B = 5,
         .T = 150,
         .S = 140,
         .N = 2,
         .D = D,
         .left = 30,
         .right = 0,
         .query_lens = q_lens,
         .key_lens = k_lens,
         .data = Data::nan_dead});
    add({.name = "more queries than keys",
         .type = type(),
         .T = 300,
         .S = 77,
         .N = 2,
         .D = D,
         .right = 0,
         .bottom_right = true,
         .data = Data::nan_dead});
    add({.name = "window misses keys",
         .type = type(),
         .T = 100,
         .S = 300,
         .N = 2,
         .D = D,
         .left = 5,
         .right = 5,
         .data = Data::nan_dead});
    add({.name = "window misses queries",
         .type = type(),
         .T = 300,
         .S = 100,
         .N = 2,
         .D = D,
         .left = 5,
         .right = 5,
         .data = Data::nan_dead});
    add({.name = "group 6",
         .type = type(),
         .B = 2,
         .T = 65,
         .S = 129,
         .N = 12,
         .K = 2,
         .D = D,
         .right = 0,
         .bottom_right = true});
    add({.name = "rising", .type = type(), .T = 129, .S = 700, .N = 2, .D = D, .data = Data::rising});
    add({.name = "falling", .type = type(), .T = 129, .S = 700, .N = 2, .D = D, .data = Data::falling});
    add({.name = "falling causal",
         .type = type(),
         .T = 500,
         .S = 500,
         .N = 2,
         .D = D,
         .right = 0,
         .data = Data::falling});
    add({.name = "huge", .T = 66, .S = 200, .N = 2, .D = D, .scale = 1, .data = Data::huge});
    add({.name = "huge one key", .T = 3, .S = 1, .N = 2, .D = D, .scale = 1, .data = Data::huge});
    add({.name = "huge causal", .T = 200, .S = 200, .D = D, .scale = 1, .right = 0, .data = Data::huge});
    add({.name = "negative scale", .type = type(), .T = 129, .S = 200, .N = 2, .D = D, .scale = -0.2, .right = 0});
    add({.name = "zero scale", .type = type(), .T = 129, .S = 200, .N = 2, .D = D, .scale = 0, .right = 0});
    add({.name = "traced scale",
         .type = type(),
         .B = 3,
         .T = 65,
         .S = 140,
         .N = 2,
         .D = D,
         .right = 0,
         .traced_scale = {0.1f, -0.3f, 0.0f}});
    add({.name = "traced scale softcap",
         .type = type(),
         .B = 2,
         .T = 65,
         .S = 140,
         .N = 2,
         .D = D,
         .softcap = 5,
         .left = 50,
         .key_lens = {100, 7},
         .traced_scale = {0.9f, -0.3f},
         .data = Data::nan_dead});
    add({.name = "padded rows",
         .type = type(),
         .B = 4,
         .T = 70,
         .S = 90,
         .N = 4,
         .K = 2,
         .D = D,
         .right = 0,
         .pad = 24,
         .two_axes = true});
    add({.name = "shared keys",
         .type = type(),
         .B = 4,
         .T = 70,
         .S = 90,
         .N = 4,
         .K = 2,
         .D = D,
         .shared_kv = true,
         .two_axes = true});
    add({.name = "long causal", .type = type(), .T = 1000, .S = 1000, .N = 2, .D = D, .right = 0});
    add({.name = "long", .type = type(), .T = 300, .S = 2100, .N = 2, .D = D});
  }
  add({.name = "more than 65535 heads", .B = 8200, .T = 2, .S = 3, .N = 8, .K = 4, .D = 8, .right = 0});
  return list;
}

}  // namespace cases
