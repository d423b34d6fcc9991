// Which probabilities survive dropout: a pure function of a seed and of positions, so that tiling, devices and passes
// cannot change it.
//
// Philox4x32 with seven rounds (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011). One block of four
// words serves the four elements {i, i + 8} x {j, j + 8} with bit 3 of i and j clear, which one thread of a tensor-core
// kernel owns both in S and in S transposed; its counter is (i, j, 0, 0) and its key the seed.
#pragma once
#include "core/spec.h"

namespace jax_flash2 {

struct Philox {
  uint32_t x, y, z, w;

  // Counters to blocks: several at once, for each round waits for the one before.
  template <int kCount>
  static JAX_FLASH2_HD constexpr void blocks(Philox (&c)[kCount], uint32_t key0, uint32_t key1) {
    for (int round = 0; round < 7; round++) {
      for (Philox& at : c) {
        const uint64_t a = uint64_t{0xD2511F53u} * at.x, b = uint64_t{0xCD9E8D57u} * at.z;
        at = {uint32_t(b >> 32) ^ at.y ^ key0, uint32_t(b), uint32_t(a >> 32) ^ at.w ^ key1, uint32_t(a)};
      }
      key0 += 0x9E3779B9u, key1 += 0xBB67AE85u;
    }
  }
};

template <class Real>
struct Dropout {
  uint32_t last;        // the largest word that is dropped
  uint32_t key0, key1;  // the seed
  Real scale;           // of what is kept; 0: no dropout

  // Words below round(rate 2^32), ties to even, are dropped.
  static JAX_FLASH2_HD Dropout make(double rate, const uint32_t* seed) {
    if (!seed) return {};
    const double words = rate * 4294967296.0;
    auto threshold = static_cast<uint64_t>(words);
    const double rest = words - static_cast<double>(threshold);
    if (rest > 0.5 || (rest == 0.5 && threshold % 2)) threshold++;
    if (threshold == 0) return {};
    return {static_cast<uint32_t>(threshold - 1), seed[0], seed[1], static_cast<Real>(1 / (1 - rate))};
  }

  JAX_FLASH2_HD constexpr bool present() const { return scale != Real(0); }

  // What decides (i, j), (i, j + 8), (i + 8, j) and (i + 8, j + 8), bit 3 of i and j clear, and of the kCount - 1 further
  // ones that many steps of (di, dj) on: see keeps.
  template <int kCount>
  JAX_FLASH2_HD constexpr void words(int i, int j, int di, int dj, Philox (&to)[kCount]) const {
    for (int x = 0; x < kCount; x++) to[x] = {uint32_t(i + x * di), uint32_t(j + x * dj), 0, 0};
    Philox::blocks(to, key0, key1);
  }
  JAX_FLASH2_HD constexpr bool keeps(uint32_t word) const { return word > last; }

  // Which of the first four are kept, from bit 0 on.
  JAX_FLASH2_HD constexpr uint32_t kept(int i, int j) const {
    Philox one[1]{};
    words(i, j, 0, 0, one);
    return kept(one[0]);
  }
  JAX_FLASH2_HD constexpr uint32_t kept(const Philox& p) const {
    const auto bit = [&](uint32_t word, int at) { return uint32_t(keeps(word)) << at; };
    return bit(p.x, 0) | bit(p.y, 1) | bit(p.z, 2) | bit(p.w, 3);
  }

  // What the probability of query i and key j is multiplied by.
  JAX_FLASH2_HD constexpr Real factor(int i, int j) const {
    if (!present()) return Real(1);
    return kept(i & ~8, j & ~8) >> ((i & 8 ? 2 : 0) + (j & 8 ? 1 : 0)) & 1 ? scale : Real(0);
  }
};

}  // namespace jax_flash2
