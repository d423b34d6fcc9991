// The online softmax of Hopper's forward on the host, of two rows at a time, against float64: tile after tile of scores
// that grow, fall, are removed, or are as low as numbers go. The four lanes of a quad hold the same scores.
#include <cuda_runtime.h>

#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

static float __shfl_xor_sync(unsigned, float x, int) { return x; }
static bool __any_sync(unsigned, bool x) { return x; }

#include "cuda/sm90/softmax.cuh"

namespace jax_flash2::cuda::sm90 {
namespace {

long checks = 0, failures = 0;

constexpr int kCols8 = 8, kKeys = 2 * kCols8;  // of a row, in a lane

struct Rows {
  std::vector<float> scores[2];  // -inf: removed
  bool dead[2] = {false, false};
};

// first_fast: tiles from it on are whole, and done without looking for a maximum.
template <bool kNatural>
void check(const char* what, const Rows& rows, int first_fast) {
  RowSoftmax<kNatural> softmax;
  softmax.start(kLog2e, rows.dead[0], rows.dead[1]);
  const int tiles = int(rows.scores[0].size()) / kKeys;
  double out[2] = {0, 0};  // the sum of powers times the number of the key
  const auto rescale = [&](const float (&factor)[2]) { out[0] *= factor[0], out[1] *= factor[1]; };
  for (int tile = 0; tile < tiles; tile++) {
    float s[kCols8][4];
    for (int x = 0; x < kCols8 * 4; x++) {
      s[x / 4][x % 4] = rows.scores[x / 2 % 2][tile * kKeys + x / 4 * 2 + x % 2];
    }
    if (tile == 0) {
      softmax.template exact<true>(s, rescale);
    } else if (tile < first_fast) {
      softmax.template exact<false>(s, rescale);
    } else {
      softmax.fast(s, rescale);
    }
    for (int x = 0; x < kCols8 * 4; x++) {
      out[x / 2 % 2] += double(s[x / 4][x % 4]) * (tile * kKeys + x / 4 * 2 + x % 2);
    }
  }
  if (first_fast < tiles && softmax.lost(!rows.dead[0], !rows.dead[1])) return check<kNatural>(what, rows, tiles);
  for (int h = 0; h < 2; h++) {
    double top = -INFINITY, sum = 0, mean = 0;
    for (float y : rows.scores[h]) top = std::max<double>(top, y);
    for (size_t j = 0; j < rows.scores[h].size(); j++) {
      const double p = top == -INFINITY ? 0 : std::exp(rows.scores[h][j] - top);
      sum += p, mean += p * double(j);
    }
    const RowEnd end = softmax.finish(h, !rows.dead[h]);
    const bool none = rows.dead[h] || sum == 0;
    const double lse = top + std::log(4 * sum);  // four lanes
    const bool right = none ? end.inverse == 0 && end.lse == -INFINITY
                            : std::fabs(4 * out[h] * end.inverse - mean / sum) <= 1e-4 * (1 + mean / sum) &&
                                  std::fabs(end.lse - lse) <= 1e-6 * std::fabs(lse) + 1e-5;
    checks++;
    if (right || ++failures > 20) continue;
    std::printf("FAILED %s, row %d, natural %d: %g, not %g; lse %g, not %g\n", what, h, kNatural,
                4 * out[h] * end.inverse, mean / sum, end.lse, lse);
  }
}

}  // namespace
}  // namespace jax_flash2::cuda::sm90

int main() {
  using namespace jax_flash2::cuda::sm90;
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  for (int which = 0; which < 400; which++) {
    for (const float growth : {0.0f, 1.0f, 20.0f, -20.0f, 900.0f}) {
      Rows whole, holes;
      for (int h = 0; h < 2; h++) {
        for (int j = 0; j < 6 * kKeys; j++) {
          const float score = 3 * normal(random) + growth * float(j) / kKeys;
          whole.scores[h].push_back(score);
          holes.scores[h].push_back(random() % 3 == 0 || which % 5 == j / kKeys ? -INFINITY : score);
        }
        holes.dead[h] = which % 7 == h;
        if (holes.dead[h]) holes.scores[h].assign(6 * kKeys, -INFINITY);
      }
      check<false>("whole tiles", whole, 1), check<true>("whole tiles", whole, 1);
      check<false>("whole tiles, one by one", whole, 6), check<true>("whole tiles, one by one", whole, 6);
      check<false>("holes", holes, 6), check<true>("holes", holes, 6);
      // As low as numbers go: a row of them is a plain mean, and beside any other score they are nothing.
      Rows lowest = holes;
      for (int h = 0; h < 2; h++) {
        for (float& y : lowest.scores[h]) {
          if (y > -INFINITY && (which % 2 == 0 || random() % 2 == 0)) y = -FLT_MAX * (which % 3 == 0 ? 0.75f : 1.0f);
        }
      }
      check<true>("the lowest number", lowest, 6);
    }
  }
  std::printf("%ld checks, %ld failed\n", checks, failures);
  return failures != 0;
}
