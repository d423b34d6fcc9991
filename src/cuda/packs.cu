// A thread finds a query's span and a key's, by a search in its pack's starts, which each block puts right for itself.
#include "cuda/packs.h"

#include <algorithm>

#include "cuda/launch_kernel.cuh"
#include "cuda/ptx/grid.cuh"

namespace jax_flash2::cuda {
namespace {

constexpr int kThreads = 256, kEach = (kMostSequences + 1) / kThreads;  // starts that a thread puts right

// One side of a pack, its numbers in shared memory.
struct Side {
  int size;  // rows
  int *starts, *lengths;
};

// Clamped to [0, size], and none below those before it. By all threads.
__device__ __forceinline__ void put_right(const int32_t* given, int count, int size, int* starts) {
  __shared__ int most_of_warp[kThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int own[kEach], most = 0;
#pragma unroll
  for (int x = 0; x < kEach; x++) {
    const int at = int(threadIdx.x) * kEach + x;
    most = max_(most, at < count ? clamp_(given[at], 0, size) : 0);
    own[x] = most;
  }
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, most, step);
    if (lane >= step) most = max_(most, other);
  }
  int before = __shfl_up_sync(~0u, most, 1);
  if (lane == 0) before = 0;
  if (lane == 31) most_of_warp[warp] = most;
  __syncthreads();  // all warps have told their largest
#pragma unroll
  for (int x = 0; x < kThreads / 32; x++) before = max_(before, x < warp ? most_of_warp[x] : 0);
#pragma unroll
  for (int x = 0; x < kEach; x++) {
    const int at = int(threadIdx.x) * kEach + x;
    if (at < count) starts[at] = max_(before, own[x]);
  }
  __syncthreads();  // the starts are there, and the warps' largest are read
}

// A pack, as the rows of one side see it.
struct View {
  Side mine, other;
  int sequences, before, after;  // how far a row sees of the other side from where it stands there
  bool shifted;                  // by what the other side's sequence is longer

  // What a row reads. It stands at its index in its sequence. Rows in no sequence have an empty span between those of their
  // neighbours, so that neither end ever decreases.
  __device__ __forceinline__ Span find_span(int row, int* position) const {
    int b = 0;  // the last sequence, but for the end, that begins at the row or before it
#pragma unroll 1
    for (int end = sequences; end - b > 1;) {
      const int middle = (b + end) / 2;
      const bool begins = mine.starts[middle] <= row;
      b = begins ? middle : b, end = begins ? end : middle;
    }
    const int index = row - mine.starts[b], length = mine.lengths[b], low = other.starts[b];
    const int high = low + other.lengths[b];
    *position = low + index + (shifted ? other.lengths[b] - length : 0);
    const bool inside = 0 <= index && index < length;
    const int nearest = index < 0 ? low : high;
    const int begin = inside ? clamp_(*position - before, low, high) : nearest;
    const int end = inside ? clamp_(*position + after + 1, low, high) : nearest;
    return {begin < end ? begin : ~begin, end};
  }

  // Whether each row of sequence b reads something and none lies behind it; of the first and the last, at the ends.
  __device__ __forceinline__ bool is_alive(int b) const {
    const int length = mine.lengths[b], others = other.lengths[b];
    const int first = shifted ? others - length : 0, last = first + length - 1;
    const bool reads = length == 0 || (others > 0 && first + after >= 0 && last - before < others);
    return reads && mine.starts[b + 1] - mine.starts[b] == length && (b > 0 || mine.starts[0] == 0) &&
           (b < sequences - 1 || mine.starts[sequences] == mine.size);
  }
};

__global__ void __launch_bounds__(kThreads)
    rows_kernel(const __grid_constant__ Packs packs, const __grid_constant__ PackedRows rows, const uint32_t blocks) {
  __shared__ int starts_s[2][kMostSequences + 1], lengths_s[2][kMostSequences];
  ptx::let_kernel_behind_begin();
  ptx::wait_for_kernels_before();
  const int sequences = packs.sequences, starts = sequences + 1;
  const int64_t pack = blockIdx.x / blocks;
  const bool same = !packs.key_starts;  // then of no more rows than both sides have
  const int row = int(blockIdx.x % blocks) * kThreads + int(threadIdx.x), least = min_(packs.queries, packs.keys);
  const auto side = [&](int x) {
    return Side{x == 0 ? packs.queries : packs.keys, starts_s[same ? 0 : x], lengths_s[x]};
  };
#pragma unroll 1
  for (int x = 0; x < (same ? 1 : 2); x++) {
    const int32_t* const given = x == 0 ? packs.query_starts : packs.key_starts;
    put_right(given + pack * starts, starts, same ? least : side(x).size, side(x).starts);
  }
#pragma unroll 1
  for (int x = 0; x < 2; x++) {
    const int32_t* const used = x == 0 ? packs.query_used : packs.key_used;
#pragma unroll 1
    for (int b = threadIdx.x; b < sequences; b += kThreads) {
      const int whole = side(x).starts[b + 1] - side(x).starts[b];
      side(x).lengths[b] = used ? clamp_(used[pack * sequences + b], 0, whole) : whole;
    }
  }
  __syncthreads();  // lengths are there

  bool alive = true;
#pragma unroll
  for (int x = 0; x < 2; x++) {
    const View view{.mine = side(x),
                    .other = side(1 - x),
                    .sequences = sequences,
                    .before = x == 0 ? packs.before : packs.after,
                    .after = x == 0 ? packs.after : packs.before,
                    .shifted = packs.bottom_right};
    if (row < view.mine.size) {
      const int64_t at = pack * view.mine.size + row;
      int position;
      (x == 0 ? rows.key_spans : rows.query_spans)[at] = view.find_span(row, &position);
      if (x == 0) rows.positions[at] = position;
    }
    if (blockIdx.x % blocks != 0) continue;
#pragma unroll 1
    for (int b = threadIdx.x; b < sequences; b += kThreads) alive &= view.is_alive(b);
  }
  alive = __syncthreads_and(alive);
  if (row == 0) rows.span_flags[pack] = alive ? 3 : 1;
}

}  // namespace

Status find_rows(const Packs& packs, const PackedRows& rows, cudaStream_t stream) {
  if (packs.packs == 0) return {};
  const int64_t blocks = std::max(1, (std::max(packs.queries, packs.keys) + kThreads - 1) / kThreads);
  return launch_kernel({.early = can_wait(rows_kernel)}, rows_kernel, packs.packs * blocks, kThreads, 0, stream, packs,
                       rows, uint32_t(blocks));
}

}  // namespace jax_flash2::cuda
