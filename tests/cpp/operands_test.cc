// What the CUDA bodies make of operands, line by line, against Addend, Dropout and the formulas pair by pair; on the host,
// where a lane is all there is. Which pairs a lane has, and that lanes agree, is for a GPU to test.
#include <cuda_runtime.h>

#include <cmath>
#include <cstdio>
#include <random>
#include <utility>
#include <vector>

// What device code asks of its compiler and of the hardware: other lanes have nothing to add.
#define __noinline__ __attribute__((noinline))
static struct {
  unsigned x = 0;
} threadIdx;
static float __shfl_xor_sync(unsigned, float, int) { return 0; }
// A quad is four runs, the lanes' one after the other, and then four again, of which each finds what all gave in the first.
static struct {
  uint32_t given[4][8];
  int calls = 0;
} quad;
static uint32_t __shfl_sync(unsigned, uint32_t x, int lane, int width) {
  const int group = quad.calls++ / width;
  quad.given[threadIdx.x % 4][group] = x;
  return quad.given[lane][group];
}
static void atomicAdd(float* to, float x) { *to += x; }

#include "cuda/backward_operands.cuh"

namespace jax_flash2::cuda {
namespace {

long checks = 0, failures = 0;

void expect(bool ok, const char* what, int i, int j) {
  checks++;
  if (!ok && ++failures <= 20) std::printf("FAILED %s of query %d and key %d\n", what, i, j);
}
bool close(float a, float b) { return a == b || std::fabs(a - b) <= 1e-4f * (1 + std::fabs(b)); }

constexpr int T = 96, S = 161;  // odd: rows begin at addresses of either kind

// The arrays of a call, of which each case takes some.
struct Arrays {
  std::vector<double> bias64 = std::vector<double>(T * S);
  std::vector<float> bias32 = std::vector<float>(T * S);
  std::vector<uint16_t> bias16 = std::vector<uint16_t>(T * S);
  std::vector<uint8_t> mask = std::vector<uint8_t>(T * S);
  std::vector<int32_t> query_ids = std::vector<int32_t>(T), key_ids = std::vector<int32_t>(S), positions = query_ids;

  explicit Arrays(std::mt19937& random) {
    const auto below = [&](int n) { return int(random() % n); };
    for (int x = 0; x < T * S; x++) {
      bias64[x] = below(10) == 0 ? -INFINITY : below(10) == 0 ? -3.4e38 : below(2000) / 500.0 - 2;
      bias32[x] = static_cast<float>(bias64[x]), bias16[x] = uint16_t(0x3c00 + below(0x300)), mask[x] = below(4) > 0;
      if (below(10) == 0) bias16[x] = 0xfc00;  // -inf in float16, a number in bfloat16
    }
    for (int& x : query_ids) x = below(4) - 1;
    for (int& x : key_ids) x = below(4) - 1;
    for (int& x : positions) x = below(S);
  }
};

// Case number `which` of all combinations.
Operands operands_of(const Arrays& a, int which) {
  Operands o{};
  Addend<float>& to = o.addend;
  switch (which % 5) {
    case 1: to.bias = a.bias64.data(), to.bias_dtype = DType::kF64; break;
    case 2: to.bias = a.bias32.data(), to.bias_dtype = DType::kF32; break;
    case 3: to.bias = a.bias16.data(), to.bias_dtype = DType::kF16; break;
    case 4: to.bias = a.bias16.data(), to.bias_dtype = DType::kBF16; break;
  }
  to.bias_row = which / 5 % 2 ? S : 0, to.bias_col = which / 10 % 2 ? 1 : 0;
  if (which / 20 % 2) to.sloped = true, to.slope = 0.25f, to.off = 17;
  if (which / 40 % 2) to.positions = a.positions.data();
  if (which / 80 % 2) to.mask = a.mask.data(), to.mask_row = S, to.mask_col = 1;
  if (which / 160 % 2) to.query_ids = a.query_ids.data(), to.key_ids = a.key_ids.data();
  if (which / 320 % 2) {
    const uint32_t seed[2] = {12, 34};
    o.dropout = Dropout<float>::make(0.3, seed);
  }
  o.note_acts();
  return o;
}
constexpr int kCases = 640;

template <bool kAlongKeys, int kPairs>
void check_add(const Operands& o, Lines<kAlongKeys, kPairs> lines, const uint32_t (&pairs)[2]) {
  uint32_t left[2] = {pairs[0], pairs[1]}, who[2] = {pairs[0], pairs[1]}, called[2] = {pairs[0], pairs[1]};
  float bias[2][kPairs] = {}, called_bias[2][kPairs];
  o.ask(o.acts, lines, left, bias), o.ask_who(o.acts, lines, who), o.call_ask(lines, called, called_bias);
  float slopes[2][kPairs] = {}, later[2][kPairs] = {};
  uint32_t late[2] = {who[0], who[1]};
  const auto slopes_at = [&](int h, int x) -> float& { return slopes[h][x]; };
  if constexpr (kAlongKeys) {
    const Held held = o.hold(lines.i, T);
    o.add<true, 8>(held, lines, late, [&](int h, int x) -> float& { return later[h][x]; });
    o.add<false, 8>(held, lines, late, slopes_at);
  } else if (o.acts.slope()) {
    o.add_slope(lines, pairs, slopes_at);
  }
  for (int h = 0; h < 2; h++) {
    for (int x = 0; x < kPairs; x++) {
      const int i = lines.query(h, x), j = lines.key(h, x), step = x / 2 * 8 + x % 2;
      expect(i == lines.i + (kAlongKeys ? 8 * h : step) && j == lines.j + (kAlongKeys ? step : 8 * h), "the place", i,
             j);
      const bool named = pairs[h] >> x & 1;
      const float added = named ? o.addend.at(i, j) : -INFINITY;
      expect((left[h] >> x & 1) == (added != -INFINITY), "what is left", i, j);
      expect((called[h] >> x & 1) == (added != -INFINITY), "what is left by a call", i, j);
      if (kAlongKeys) expect((late[h] >> x & 1) == (added != -INFINITY), "what is left later", i, j);
      expect((who[h] >> x & 1) == (named && o.addend.keeps(i, j)), "who is left", i, j);
      if (added == -INFINITY) continue;
      expect(close(bias[h][x] + slopes[h][x], added), "the sum", i, j);
      if (kAlongKeys) expect(close(later[h][x], added), "the sum later", i, j);
      expect(close(called_bias[h][x] + slopes[h][x], added), "the sum by a call", i, j);
    }
  }
}

// A mask whose rows begin at multiples of 4 bytes, and end inside a lane's 16.
template <int kPairs>
void check_words(int i0, int j0, std::mt19937& random) {
  constexpr int kRows = 20, kKeys = 148;
  alignas(4) static uint8_t mask[kRows * kKeys];
  for (uint8_t& x : mask) x = random() % 3 > 0;
  Operands o{};
  o.addend.mask = mask, o.addend.mask_row = kKeys, o.addend.mask_col = 1, o.mask.q_len = kRows, o.note_acts();
  expect(o.acts.mask_in_words(), "a mask in words", i0, j0);
  for (unsigned run = 0; run < 8; run++) {
    threadIdx.x = run % 4, quad.calls = 0;
    const Lines<true, kPairs> lines{i0, j0 + 2 * int(run % 4)};
    uint32_t all[2] = {}, pairs[2];
    lines.all([&](int h, int x) {
      all[h] |= uint32_t(lines.query(h, x) < kRows && lines.key(h, x) < kKeys && random() % 8 > 0) << x;
    });
    pairs[0] = all[0], pairs[1] = all[1];
    o.ask_who(o.acts, lines, pairs);
    if (run < 4) continue;
    lines.all([&](int h, int x) {
      const int i = lines.query(h, x), j = lines.key(h, x);
      const bool left = (all[h] >> x & 1) && o.addend.keeps(i, j);
      expect((pairs[h] >> x & 1) == left, "who is left by words", i, j);
    });
  }
  threadIdx.x = 0;
}

template <int kPairs>
void check_differentiate(const Operands& o, Lines<false, kPairs> lines, const uint32_t (&pairs)[2], bool shared,
                         float softcap, std::mt19937& random) {
  uint32_t kept[2], seen[2] = {pairs[0], pairs[1]};
  o.keep(lines, kept);
  std::vector<float> grads(T * S, 0.0f), slopes(T, 0.0f);
  BackwardOperands b{};
  static_cast<Operands&>(b) = o;
  float* const bias_g = o.addend.bias ? grads.data() : nullptr;
  b.gradients = {bias_g, shared ? 0 : S, shared ? 0 : 1, shared, o.addend.sloped ? slopes.data() : nullptr, 1};
  const Score<float> score{0.5f, softcap};
  float s[2][kPairs], dp[2][kPairs], bias[2][kPairs], total = 0;
  float old_s[2][kPairs], old_dp[2][kPairs];
  for (int h = 0; h < 2; h++) {
    for (int x = 0; x < kPairs; x++) {
      s[h][x] = old_s[h][x] = random() % 100 / 50.0f, dp[h][x] = old_dp[h][x] = random() % 100 / 50.0f;
    }
  }
  const auto power = [](float y) { return std::exp(y); };
  const auto lses = [](int x) { return float2{-0.1f * x, -0.1f * (x + 1)}; };
  const auto s_at = [&](int h, int x) -> float& { return s[h][x]; };
  if (softcap == 0) b.ask(b.acts, lines, seen, bias);
  b.probabilities(lines, seen, bias, score, power, lses, s_at);
  b.differentiate(
      lines, seen, kept, T, score, power, lses, [](int x) { return float2{0.2f * x, 0.2f * (x + 1)}; }, s_at,
      [&](int h, int x) -> float& { return dp[h][x]; });
  for (int h = 0; h < 2; h++) {
    for (int x = 0; x < kPairs; x++) {
      const int i = lines.query(h, x), j = lines.key(h, x);
      const float added = pairs[h] >> x & 1 ? o.addend.at(i, j) : -INFINITY, factor = o.dropout.factor(i, j);
      expect((kept[h] >> x & 1) == (factor != 0), "what dropout keeps", i, j);
      const bool left = added != -INFINITY;
      const float qk = 0.5f * old_s[h][x], capped = softcap != 0 ? softcap * std::tanh(qk / softcap) : qk;
      const float probability = left ? std::exp(capped + added - 0.1f * x) : 0;
      const float ds = left ? probability * (old_dp[h][x] * factor - 0.2f * x) : 0;
      expect(close(s[h][x], probability * factor), "the probability", i, j);
      expect(close(dp[h][x], ds * score.slope(capped)), "the score's gradient", i, j);
      if (bias_g && !shared) expect(close(grads[i * S + j], ds), "the bias's gradient", i, j);
      total += ds;
      if (o.addend.sloped && left) slopes[i] += ds * o.addend.distance(i, j);  // which it has subtracted
    }
  }
  if (bias_g && shared) {
    expect(std::fabs(grads[0] - total) <= 1e-3f * (1 + std::fabs(total)), "the sum of a shared bias", 0, 0);
  }
  for (int i = 0; i < T; i++) expect(std::fabs(slopes[i]) < 1e-2f, "the slope's gradient", i, 0);
}

}  // namespace
}  // namespace jax_flash2::cuda

int main() {
  using namespace jax_flash2::cuda;
  std::mt19937 random(7);
  for (int which = 0; which < kCases; which++) {
    const Arrays arrays(random);
    const Operands o = operands_of(arrays, which);
    const uint32_t all = ~0u, some = uint32_t(random());
    const int i = int(random() % 5) * 16 + int(random() % 4) * 2, j = int(random() % 2) * 16 + int(random() % 4) * 2;
    for (const auto& [first, second] : {std::pair{all, all}, {some, ~some}, {all, 0u}, {0u, 0u}}) {
      const auto of = [&, first, second](uint32_t bits, const auto& check) {
        const uint32_t pairs[2] = {first & bits, second & bits};
        check(pairs);
      };
      of(0xffff, [&](auto& pairs) { check_add(o, Lines<true, 16>{i, j}, pairs); });
      of(~0u, [&](auto& pairs) { check_add(o, Lines<true, 32>{i, j}, pairs); });
      of(0xff, [&](auto& pairs) { check_add(o, Lines<false, 8>{i, j}, pairs); });
      if (i < 16) of(0xffff, [&](auto& pairs) { check_add(o, Lines<false, 16>{i, j}, pairs); });
      for (const float cap : {0.0f, 3.0f}) {
        of(0xf,
           [&](auto& pairs) { check_differentiate(o, Lines<false, 4>{i, j}, pairs, which % 3 == 0, cap, random); });
        if (i >= 16) continue;
        of(0xffff,
           [&](auto& pairs) { check_differentiate(o, Lines<false, 16>{i, j}, pairs, which % 3 == 1, cap, random); });
      }
    }
  }
  for (int i = 0; i < 32; i++) {
    for (int j = 0; j < 192; j += 16) check_words<16>(i, j, random), check_words<32>(i, j, random);
  }
  std::printf("%ld checks, %ld failed\n", checks, failures);
  return failures != 0;
}
