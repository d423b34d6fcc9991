// Sizes of the float32 kernels: data, and what follows from it. Both passes are made of products of panels, 64 x 64 floats
// in shared memory, of which a thread computes 8 x 4: for each 128 FMAs it reads 12 float4, which shared memory brings in
// half the time, and a row's 16 threads are half a warp, so that a row is a warp's own affair.
#pragma once

namespace jax_flash2::cuda::fma {

inline constexpr int kSide = 64;               // rows and columns of a panel
inline constexpr int kPanel = kSide * kSide;   // floats
inline constexpr int kThreads = 128;           // of a block
inline constexpr int kRows = 8, kCols = 4;     // of a thread in a panel
inline constexpr int kStatistics = 3 * kSide;  // floats: what a backward knows of each query of a panel

// What a block works out once and keeps in shared memory, for registers are full: where its batch row begins in each
// operand, in those of keys its head too, which tiles of its walk are full, and whether the ranges of the mask say all that
// there is to say of pairs.
struct Plan {
  const float *q_g, *k_g, *v_g, *dout_g, *lse_g, *delta_g;
  int full_begin, full_end;
  bool plain;
};

// Shared memory that a block may have where there is least: compute capability 8.6, 8.9, 12.x. Every kernel here stays
// below it, so that there is one configuration for all devices.
inline constexpr int kSharedBytesSmall = 99 * 1024;

// Two slots load a panel while the one before is used. One slot leaves that to the other blocks of the SM, of which then
// more fit; blocks_per_sm bounds the registers.
template <int kHeadDim>
struct ForwardConfig {
  static constexpr int kPanels = kHeadDim / kSide;  // of a row of Q, and of V
  static constexpr int kSlots = kHeadDim == 64 ? 2 : 1;
  static constexpr int kBlocksPerSm = kHeadDim == 256 ? 2 : 3;
  static constexpr int kSharedBytes = (kPanels + kSlots + 1) * kPanel * 4 + int{sizeof(Plan)};  // Q; K or V; P
  static_assert(kHeadDim % kSide == 0 && kSharedBytes <= kSharedBytesSmall);
};

template <int kHeadDim>
struct BackwardConfig {
  static constexpr int kPanels = kHeadDim / kSide;
  static constexpr int kSlots = 2;
  static constexpr int kBlocksPerSm = 2;
  static constexpr int kSharedBytes =
      ((2 * kSlots + 2) * kPanel + kStatistics) * 4 + int{sizeof(Plan)};  // two operands; P; dS
  static constexpr bool kKeysAtOnce = kHeadDim <= 128;  // dK and dV by one kernel; else registers hold one of them
  static_assert(kHeadDim % kSide == 0 && kSharedBytes <= kSharedBytesSmall);
};

}  // namespace jax_flash2::cuda::fma
