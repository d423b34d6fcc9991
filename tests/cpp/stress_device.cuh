// How stress.cu lays tensors in memory, fills them and compares them, on the GPU. Knows no attention but for which
// queries and keys are read at all.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "stress_case.h"
#include "stress_reference.cuh"

namespace stress {

// A tensor in memory: its dims and strides, and the way back from a place in memory to an element. Unused elements lie
// behind each row of [B, H, L, D] or [B, L, H, D] memory, and behind each batch row.
struct Layout {
  int B0, B1, L, H, D;
  bool heads_first;
  int64_t batch0, batch1, outer, inner;  // strides: outer of a head or position, inner of the other one

  Layout(const Case& c, const Placement& p, int L, int H, int D)
      : B0(p.shared0 ? 1 : c.B0), B1(p.shared1 ? 1 : c.B1), L(L), H(H), D(D), heads_first(p.heads_first) {
    inner = heads_first ? D + p.pad_inner : D;
    outer = heads_first ? L * inner + p.pad_outer : H * inner + p.pad_inner;
    outer = std::max<int64_t>(outer, 8);  // L = 0
    batch1 = (heads_first ? H : std::max(L, 1)) * outer + p.pad_outer, batch0 = B1 * batch1;
  }
  int64_t size() const { return B0 * batch0; }  // elements, unused ones included
  View view() const {
    return {B0 == 1 ? 0 : batch0, B1 == 1 ? 0 : batch1, heads_first ? inner : outer, heads_first ? outer : inner};
  }
  // The element at x, or false where x is unused.
  __host__ __device__ bool element(int64_t x, int* b0, int* b1, int* l, int* h, int* d) const {
    *b0 = int(x / batch0), x %= batch0, *b1 = int(x / batch1), x %= batch1;
    const int major = int(x / outer), minor = int(x % outer / inner);
    *l = heads_first ? minor : major, *h = heads_first ? major : minor, *d = int(x % outer % inner);
    return *h < H && *l < L && *d < D;
  }
};

__device__ inline double hashed(uint64_t x) {  // (0, 1)
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull, x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return (double((x ^ (x >> 31)) >> 12) + 0.5) * 0x1p-52;
}

enum Kind { kQuery, kKey, kValue, kGradient };

// Normal numbers; keys grow as `data` says; NaN where unused and where nobody reads (`live`, null: everywhere is read).
template <class E>
__global__ void fill(E* to, Layout at, int64_t size, Kind kind, Data data, uint64_t seed, const unsigned char* live) {
  const int64_t x = int64_t(blockIdx.x) * 256 + threadIdx.x;
  if (x >= size) return;
  int b0, b1, l, h, d;
  float value = NAN;
  if (at.element(x, &b0, &b1, &l, &h, &d) && (!live || live[(b0 * at.B1 + b1) * at.L + l])) {
    const uint64_t key = ((seed * 4 + kind) << 34) ^ uint64_t(x * 2);
    value = float(sqrt(-2 * log(hashed(key))) * cospi(2 * hashed(key + 1)));
    const float part = float(l) / float(at.L);
    if (kind == kKey && data == Data::rising) value *= 0.1f + 60 * part * part;
    if (kind == kKey && data == Data::falling) value *= 0.1f + 60 * (1 - part) * (1 - part);
    if (kind == kKey && data == Data::jump) value *= l / 32 == at.L / 64 ? 60 : 0.5f;
    if (kind != kGradient && data == Data::zero) value = 0;
  }
  to[x] = E(value);
}

// Queries that see a key, or keys that a query sees: by trying all.
static __global__ void find_live(const Row* rows, int batches, int T, int S, bool of_queries, unsigned char* live) {
  const int own = of_queries ? T : S, other = of_queries ? S : T;
  const int64_t x = int64_t(blockIdx.x) * 128 + threadIdx.x;
  if (x >= int64_t(batches) * own) return;
  bool found = false;
  for (int y = 0; y < other && !found; y++)
    found = of_queries ? rows[x / own].sees(x % own, y) : rows[x / own].sees(y, x % own);
  live[x] = found;
}

// What comparing leaves behind.
struct Verdict {
  unsigned long long first;   // place of the first wrong element, all ones: none
  unsigned int wrong, worst;  // how many; the largest share of what is allowed, as a float's bits
};

// Every element of a 16-bit result, and every unused place, against exact [B, H, L, D].
template <class E>
__global__ void compare(const E* got, Layout at, int64_t size, const double* exact, const double* error, Verdict* to) {
  const int64_t x = int64_t(blockIdx.x) * 256 + threadIdx.x;
  if (x >= size) return;
  int b0, b1, l, h, d;
  bool wrong;
  if (at.element(x, &b0, &b1, &l, &h, &d)) {
    const int64_t from = (((int64_t(b0) * at.B1 + b1) * at.H + h) * at.L + l) * at.D + d;
    const double off = fabs(double(float(got[x])) - exact[from]);
    wrong = !(off <= error[from]);
    if (!wrong && error[from] > 0) atomicMax(&to->worst, __float_as_uint(float(off / error[from])));
  } else {
    wrong = reinterpret_cast<const uint16_t*>(got)[x] != 0xffff;
  }
  if (wrong) atomicAdd(&to->wrong, 1u), atomicMin(&to->first, static_cast<unsigned long long>(x));
}

// The same for a dense float32 result; -inf where exact has it and nowhere else.
static __global__ void compare_rows(const float* got, int64_t size, const double* exact, const double* error,
                                    Verdict* to) {
  const int64_t x = int64_t(blockIdx.x) * 256 + threadIdx.x;
  if (x >= size) return;
  const double off = exact[x] == -INFINITY ? (got[x] == -INFINITY ? 0 : INFINITY) : fabs(double(got[x]) - exact[x]);
  const bool wrong = !(off <= error[x]);
  if (wrong) atomicAdd(&to->wrong, 1u), atomicMin(&to->first, static_cast<unsigned long long>(x));
  if (!wrong && error[x] > 0) atomicMax(&to->worst, __float_as_uint(float(off / error[x])));
}

static __global__ void differ(const uint16_t* a, const uint16_t* b, int64_t size, unsigned int* count) {
  for (int64_t x = int64_t(blockIdx.x) * 256 + threadIdx.x; x < size; x += int64_t(gridDim.x) * 256)
    if (a[x] != b[x]) atomicAdd(count, 1u);
}

// Leaves NaN in shared memory, and keeps some multiprocessors busy for a while beside what is tested.
static __global__ void disturb(int64_t clocks) {
  extern __shared__ unsigned int garbage[];
  unsigned int bytes;
  asm("mov.u32 %0, %dynamic_smem_size;" : "=r"(bytes));
  for (unsigned int x = threadIdx.x; x < bytes / 4; x += blockDim.x) garbage[x] = 0xffffffff;
  for (const int64_t start = clock64(); clock64() - start < clocks;) __nanosleep(100);
}

}  // namespace stress
