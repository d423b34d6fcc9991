// Sizes of the kernels in float32 and float64: data, and what follows from it. Both passes are made of products of panels
// in shared memory, squares with rows of 256 bytes, of which a thread computes 8 x 4 floats or 4 x 2 doubles; a row's 16
// threads are half a warp, so that a row is a warp's own affair. For each 128 FMAs of floats a thread reads 12 float4, which
// shared memory brings in half the time. For each 16 of doubles it reads 6 double2, which take as long as the FMAs where an
// SM does 64 a clock (9.0), half as long at 32 (8.0), and next to nothing at 2; panels of twice the side would not fit.
#pragma once

namespace jax_flash2::cuda::fma {

inline constexpr int kThreads = 128;  // of a block

template <class Real>
struct Panel {
  static constexpr int kChunk = 16 / sizeof(Real);         // elements that are read at once
  static constexpr int kSide = 16 * kChunk;                // rows and columns
  static constexpr int kSize = kSide * kSide;              // elements
  static constexpr int kRows = kSide / 8, kCols = kChunk;  // of a thread
};

// A thread's elements of a panel.
template <class Real>
using Elements = Real[Panel<Real>::kRows][Panel<Real>::kCols];

// What a block works out once and keeps in shared memory, for registers are full: where its batch row begins in each
// operand, in those of keys its head too, which tiles of its walk are full, and whether the ranges of the mask say all that
// there is to say of pairs.
template <class Real>
struct Plan {
  const Real *q_g, *k_g, *v_g, *dout_g, *lse_g, *delta_g;
  int full_begin, full_end;
  bool plain;
};

// Shared memory that a block may have where there is least: compute capability 8.6, 8.9, 12.x. Every kernel here stays
// below it, so that there is one configuration for all devices.
inline constexpr int kSharedBytesSmall = 99 * 1024;

// Of panels, what a backward knows of each query of a panel, and the plan.
template <class Real>
constexpr int shared_bytes(int panels, int statistics) {
  return (panels * Panel<Real>::kSize + statistics * Panel<Real>::kSide) * int{sizeof(Real)} + int{sizeof(Plan<Real>)};
}

// Two slots load a panel while the one before is used. One slot leaves that to the other blocks of the SM, of which then
// more fit; blocks_per_sm bounds the registers.
template <class Real, int kHeadDim>
struct ForwardConfig {
  static constexpr int kPanels = kHeadDim / Panel<Real>::kSide;  // of a row of Q, and of V
  static constexpr int kSlots = kHeadDim == 64 ? 2 : 1;
  static constexpr int kBlocksPerSm = kHeadDim == 256 ? 2 : 3;
  static constexpr int kSharedBytes = shared_bytes<Real>(kPanels + kSlots + 1, 0);  // Q; K or V; P
  static_assert(kHeadDim % Panel<Real>::kSide == 0 && kSharedBytes <= kSharedBytesSmall);
};

template <class Real, int kHeadDim>
struct BackwardConfig {
  static constexpr int kPanels = kHeadDim / Panel<Real>::kSide;
  static constexpr int kSlots = 2;
  static constexpr int kBlocksPerSm = 2;
  static constexpr int kStatistics = 3;  // lse, delta, and the slope's gradient
  static constexpr int kSharedBytes = shared_bytes<Real>(2 * kSlots + 2, kStatistics);  // two operands; P; dS
  static constexpr bool kKeysAtOnce = kHeadDim <= 128;  // dK and dV by one kernel; else registers hold one of them
  static_assert(kHeadDim % Panel<Real>::kSide == 0 && kSharedBytes <= kSharedBytesSmall);
};

}  // namespace jax_flash2::cuda::fma
