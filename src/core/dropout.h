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

  static JAX_FLASH2_HD constexpr Philox block(Philox c, uint32_t key0, uint32_t key1) {
    for (int round = 0; round < 7; round++) {
      const uint64_t a = uint64_t{0xD2511F53u} * c.x, b = uint64_t{0xCD9E8D57u} * c.z;
      c = {uint32_t(b >> 32) ^ c.y ^ key0, uint32_t(b), uint32_t(a >> 32) ^ c.w ^ key1, uint32_t(a)};
      key0 += 0x9E3779B9u, key1 += 0xBB67AE85u;
    }
    return c;
  }
};

template <class Real>
struct Dropout {
  uint64_t threshold;   // words below it are dropped; 0: no dropout
  uint32_t key0, key1;  // the seed
  Real scale;           // of what is kept

  static JAX_FLASH2_HD Dropout make(double rate, const uint32_t* seed) {
    if (!seed || !(rate > 0)) return {0, 0, 0, Real(1)};
    return {static_cast<uint64_t>(rate * 4294967296.0 + 0.5), seed[0], seed[1], static_cast<Real>(1 / (1 - rate))};
  }

  JAX_FLASH2_HD constexpr bool present() const { return threshold != 0; }

  // What the probabilities of (i, j), (i, j + 8), (i + 8, j) and (i + 8, j + 8) are multiplied by; bit 3 of i and j clear.
  struct Factors {
    Real of[4];
  };
  JAX_FLASH2_HD constexpr Factors factors(int i, int j) const {
    const Philox p = Philox::block({uint32_t(i), uint32_t(j), 0, 0}, key0, key1);
    const auto factor = [&](uint32_t word) { return word >= threshold ? scale : Real(0); };
    return {{factor(p.x), factor(p.y), factor(p.z), factor(p.w)}};
  }

  // ... of query i and key j alone.
  JAX_FLASH2_HD constexpr Real factor(int i, int j) const {
    return present() ? factors(i & ~8, j & ~8).of[(i & 8 ? 2 : 0) + (j & 8 ? 1 : 0)] : Real(1);
  }
};

// The hook of kernels that serve no dropout: every element is kept, and the compiler removes the call.
struct Keep {
  JAX_FLASH2_HD constexpr float factor(int /*i*/, int /*j*/) const { return 1.0f; }
};

}  // namespace jax_flash2
