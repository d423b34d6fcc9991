// What the CUDA bodies make of operands, line by line, against Addend, Dropout and the formulas pair by pair; on the host,
// where a lane is all there is. Which pairs a lane has, and that lanes agree, is for a GPU to test.
#include <cuda_runtime.h>

#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

// What device code asks of its compiler and of the hardware: other lanes have nothing to add.
#define __noinline__ __attribute__((noinline))
static struct {
  unsigned x = 0;
} threadIdx;
static float __shfl_xor_sync(unsigned, float, int) { return 0; }
static int __ffs(unsigned x) { return __builtin_ffs(static_cast<int>(x)); }
static void atomicAdd(float* to, float x) { *to += x; }

#include "cuda/score_gradients.cuh"

namespace jax_flash2::cuda {
namespace {

long checks = 0, failures = 0;

void expect(bool ok, const char* what, int i, int j) {
  checks++;
  if (!ok && ++failures <= 20) std::printf("FAILED %s of query %d and key %d\n", what, i, j);
}
bool close(float a, float b) { return a == b || std::fabs(a - b) <= 1e-4f * (1 + std::fabs(b)); }

constexpr int T = 96, S = 160;

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
  o.adds = true;
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
  return o;
}
constexpr int kCases = 640;

template <bool kAlongKeys, int kPairs>
void check_add(const Operands& o, Line<kAlongKeys, kPairs> line, uint32_t pairs) {
  float scores[kPairs], sums[kPairs];
  for (int x = 0; x < kPairs; x++) scores[x] = 0.5f * x;
  const uint32_t left = o.add(line, pairs, [&](int x) -> float& { return scores[x]; });
  expect(o.sum(line, pairs, sums) == left, "what is left twice", line.i, line.j);
  for (int x = 0; x < kPairs; x++) {
    const int i = line.query(x), j = line.key(x);
    expect(i == line.i + (kAlongKeys ? 0 : x / 2 * 8 + x % 2) && j == line.j + (kAlongKeys ? x / 2 * 8 + x % 2 : 0),
           "the place", i, j);
    const bool named = pairs >> x & 1;
    const float added = named ? o.addend.at(i, j) : -INFINITY;
    expect((left >> x & 1) == (added != -INFINITY), "what is left", i, j);
    if (added == -INFINITY) continue;
    expect(close(scores[x], 0.5f * x + added) && close(sums[x], added), "the sum", i, j);
  }
}

template <int kPairs>
void check_differentiate(const Operands& o, Line<false, kPairs> line, uint32_t seen, bool shared,
                         std::mt19937& random) {
  static_assert(kPairs <= 32);
  uint32_t kept[2];
  o.keep(line, kept);
  std::vector<float> bias(T * S, 0.0f), slopes(T, 0.0f);
  BackwardOperands b{};
  static_cast<Operands&>(b) = o;
  b.gradients = {bias.data(), shared ? 0 : S, shared ? 0 : 1, shared, o.addend.sloped ? slopes.data() : nullptr, 1};
  const Score<float> score{0.5f, 3.0f};
  float s[kPairs], dp[kPairs], old_s[kPairs], old_dp[kPairs], total = 0;
  for (int h = 0; h < 2; h++) {
    const Line<false, kPairs> own{line.i, line.j + 8 * h};
    for (int x = 0; x < kPairs; x++)
      old_s[x] = s[x] = random() % 100 / 50.0f, old_dp[x] = dp[x] = random() % 100 / 50.0f;
    b.differentiate(
        own, seen, kept[h], T, score, [](float y, int x) { return std::exp(y - 0.1f * x); },
        [](int x) { return 0.2f * x; }, [&](int x) -> float& { return s[x]; }, [&](int x) -> float& { return dp[x]; });
    for (int x = 0; x < kPairs; x++) {
      const int i = own.query(x), j = own.key(x);
      const float added = seen >> x & 1 ? o.adds ? o.addend.at(i, j) : 0 : -INFINITY, factor = o.dropout.factor(i, j);
      expect((kept[h] >> x & 1) == (factor != 0), "what dropout keeps", i, j);
      const bool left = added != -INFINITY;
      const float probability = left ? std::exp(old_s[x] + added - 0.1f * x) : 0;
      const float ds = left ? probability * (old_dp[x] * factor - 0.2f * x) : 0;
      expect(close(s[x], probability * factor), "the probability", i, j);
      expect(close(dp[x], ds * score.slope(old_s[x])), "the score's gradient", i, j);
      if (!shared) expect(close(bias[i * S + j], ds), "the bias's gradient", i, j);
      total += ds;
      if (o.addend.sloped && left) slopes[i] += ds * o.addend.distance(i, j);  // which it has subtracted
    }
  }
  if (shared) expect(std::fabs(bias[0] - total) <= 1e-3f * (1 + std::fabs(total)), "the sum of a shared bias", 0, 0);
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
    for (const uint32_t pairs : {all, some, 0u}) {
      check_add(o, Line<true, 16>{i, j}, pairs & 0xffff), check_add(o, Line<true, 32>{i, j}, pairs);
      check_add(o, Line<false, 8>{i, j}, pairs & 0xff);
      if (i < 16) check_add(o, Line<false, 16>{i, j}, pairs & 0xffff);
      check_differentiate(o, Line<false, 4>{i, j}, pairs & 0xf, which % 3 == 0, random);
      if (i < 16) check_differentiate(o, Line<false, 16>{i, j}, pairs & 0xffff, which % 3 == 1, random);
    }
  }
  std::printf("%ld checks, %ld failed\n", checks, failures);
  return failures != 0;
}
