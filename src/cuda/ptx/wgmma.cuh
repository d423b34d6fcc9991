// The tensor core instruction of sm_90: a warpgroup multiplies from shared memory, while it does something else.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#asynchronous-warpgroup-level-matrix-instructions
//
// Who holds what: warp w of the warpgroup has rows 16w .. 16w + 15, and of them a lane what tile/fragment.cuh says of A
// and C; d[j] is the C fragment of columns 8j .. 8j + 7. What a descriptor says of an operand in shared memory is in
// tile/operand.cuh.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace jax_flash2::cuda::ptx {

// Orders this warpgroup's accesses to registers before the products that follow; needed before the first of them and
// where other instructions have touched an accumulator or a fragment of A.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most kPending groups, the latest, are under way. Accumulators and fragments of the others may be
// touched from here on: tell the compiler by pin().
template <int kPending>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// No instruction: the compiler may not move what touches these registers past it, for it does not know that a product
// under way does.
template <int kCount>
__device__ __forceinline__ void pin(float (&r)[kCount][4]) {
#pragma unroll
  for (int i = 0; i < kCount * 4; i++) asm volatile("" : "+f"(r[i / 4][i % 4]));
}
template <int kCount>
__device__ __forceinline__ void pin(uint32_t (&r)[kCount][4]) {
#pragma unroll
  for (int i = 0; i < kCount * 4; i++) asm volatile("" : "+r"(r[i / 4][i % 4]));
}

// How a 16-bit operand lies in shared memory: along k, or along m or n.
enum class Major : int { kK = 0, kMN = 1 };

// d[64 x kN] = a[64 x 16] b[16 x kN] + (accumulate ? d : 0), a along k in shared memory (ss) or in registers (rs).
template <class Element, int kN>
struct Wgmma;

#define JAX_FLASH2_D4(j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define JAX_FLASH2_D8(j) JAX_FLASH2_D4(j), JAX_FLASH2_D4(j + 1)
#define JAX_FLASH2_D32(j) JAX_FLASH2_D8(j), JAX_FLASH2_D8(j + 2), JAX_FLASH2_D8(j + 4), JAX_FLASH2_D8(j + 6)
// Inline PTX has no named operands: i0 .. i6 are the numbers of those that follow the accumulators.
#define JAX_FLASH2_WGMMA_TYPED(Element, type, N, names, registers, i0, i1, i2, i3, i4, i5, i6)                       \
  template <>                                                                                                        \
  struct Wgmma<Element, N> {                                                                                         \
    template <Major kB>                                                                                              \
    static __device__ __forceinline__ void ss(float (&d)[N / 8][4], uint64_t a, uint64_t b, int accumulate) {        \
      asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %" #i2                                                        \
                   ", 0;\n"                                                                                          \
                   " wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." type "." type " {" names "}, %" #i0 ", %" #i1  \
                   ", p, 1, 1, 0, %" #i3 ";\n}"                                                                      \
                   : JAX_FLASH2_UNWRAP registers                                                                     \
                   : "l"(a), "l"(b), "r"(accumulate), "n"(int(kB)));                                                 \
    }                                                                                                                \
    template <Major kB>                                                                                              \
    static __device__ __forceinline__ void rs(float (&d)[N / 8][4], const uint32_t (&a)[4], uint64_t b,              \
                                              int accumulate) {                                                      \
      asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %" #i5                                                        \
                   ", 0;\n"                                                                                          \
                   " wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." type "." type " {" names "}, {%" #i0 ", %" #i1 \
                   ", %" #i2 ", %" #i3 "}, %" #i4 ", p, 1, 1, %" #i6 ";\n}"                                          \
                   : JAX_FLASH2_UNWRAP registers                                                                     \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(int(kB)));             \
    }                                                                                                                \
  };
#define JAX_FLASH2_UNWRAP(...) __VA_ARGS__
#define JAX_FLASH2_WGMMA(N, names, registers, ...)                                \
  JAX_FLASH2_WGMMA_TYPED(__nv_bfloat16, "bf16", N, names, registers, __VA_ARGS__) \
  JAX_FLASH2_WGMMA_TYPED(__half, "f16", N, names, registers, __VA_ARGS__)

#define JAX_FLASH2_N0 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define JAX_FLASH2_N1 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define JAX_FLASH2_N2 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define JAX_FLASH2_N3 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define JAX_FLASH2_N4 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define JAX_FLASH2_N5 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define JAX_FLASH2_N6 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define JAX_FLASH2_N7 ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

JAX_FLASH2_WGMMA(32, JAX_FLASH2_N0, (JAX_FLASH2_D8(0), JAX_FLASH2_D8(2)), 16, 17, 18, 19, 20, 21, 22)
JAX_FLASH2_WGMMA(64, JAX_FLASH2_N0 JAX_FLASH2_N1, (JAX_FLASH2_D32(0)), 32, 33, 34, 35, 36, 37, 38)
JAX_FLASH2_WGMMA(80, JAX_FLASH2_N0 JAX_FLASH2_N1 ",%32,%33,%34,%35,%36,%37,%38,%39",
                 (JAX_FLASH2_D32(0), JAX_FLASH2_D8(8)), 40, 41, 42, 43, 44, 45, 46)
JAX_FLASH2_WGMMA(96, JAX_FLASH2_N0 JAX_FLASH2_N1 JAX_FLASH2_N2,
                 (JAX_FLASH2_D32(0), JAX_FLASH2_D8(8), JAX_FLASH2_D8(10)), 48, 49, 50, 51, 52, 53, 54)
JAX_FLASH2_WGMMA(112, JAX_FLASH2_N0 JAX_FLASH2_N1 JAX_FLASH2_N2 ",%48,%49,%50,%51,%52,%53,%54,%55",
                 (JAX_FLASH2_D32(0), JAX_FLASH2_D8(8), JAX_FLASH2_D8(10), JAX_FLASH2_D8(12)), 56, 57, 58, 59, 60, 61,
                 62)
JAX_FLASH2_WGMMA(128, JAX_FLASH2_N0 JAX_FLASH2_N1 JAX_FLASH2_N2 JAX_FLASH2_N3, (JAX_FLASH2_D32(0), JAX_FLASH2_D32(8)),
                 64, 65, 66, 67, 68, 69, 70)
JAX_FLASH2_WGMMA(144, JAX_FLASH2_N0 JAX_FLASH2_N1 JAX_FLASH2_N2 JAX_FLASH2_N3 ",%64,%65,%66,%67,%68,%69,%70,%71",
                 (JAX_FLASH2_D32(0), JAX_FLASH2_D32(8), JAX_FLASH2_D8(16)), 72, 73, 74, 75, 76, 77, 78)
JAX_FLASH2_WGMMA(160, JAX_FLASH2_N0 JAX_FLASH2_N1 JAX_FLASH2_N2 JAX_FLASH2_N3 JAX_FLASH2_N4,
                 (JAX_FLASH2_D32(0), JAX_FLASH2_D32(8), JAX_FLASH2_D8(16), JAX_FLASH2_D8(18)), 80, 81, 82, 83, 84, 85,
                 86)
JAX_FLASH2_WGMMA(176,
                 JAX_FLASH2_N0 JAX_FLASH2_N1 JAX_FLASH2_N2 JAX_FLASH2_N3 JAX_FLASH2_N4
                 ",%80,%81,%82,%83,%84,%85,%86,%87",
                 (JAX_FLASH2_D32(0), JAX_FLASH2_D32(8), JAX_FLASH2_D8(16), JAX_FLASH2_D8(18), JAX_FLASH2_D8(20)), 88,
                 89, 90, 91, 92, 93, 94)
JAX_FLASH2_WGMMA(192, JAX_FLASH2_N0 JAX_FLASH2_N1 JAX_FLASH2_N2 JAX_FLASH2_N3 JAX_FLASH2_N4 JAX_FLASH2_N5,
                 (JAX_FLASH2_D32(0), JAX_FLASH2_D32(8), JAX_FLASH2_D32(16)), 96, 97, 98, 99, 100, 101, 102)
JAX_FLASH2_WGMMA(
    256,
    JAX_FLASH2_N0 JAX_FLASH2_N1 JAX_FLASH2_N2 JAX_FLASH2_N3 JAX_FLASH2_N4 JAX_FLASH2_N5 JAX_FLASH2_N6 JAX_FLASH2_N7,
    (JAX_FLASH2_D32(0), JAX_FLASH2_D32(8), JAX_FLASH2_D32(16), JAX_FLASH2_D32(24)), 128, 129, 130, 131, 132, 133, 134)

#undef JAX_FLASH2_D4
#undef JAX_FLASH2_D8
#undef JAX_FLASH2_D32
#undef JAX_FLASH2_WGMMA_TYPED
#undef JAX_FLASH2_UNWRAP
#undef JAX_FLASH2_WGMMA
#undef JAX_FLASH2_N0
#undef JAX_FLASH2_N1
#undef JAX_FLASH2_N2
#undef JAX_FLASH2_N3
#undef JAX_FLASH2_N4
#undef JAX_FLASH2_N5
#undef JAX_FLASH2_N6
#undef JAX_FLASH2_N7

}  // namespace jax_flash2::cuda::ptx
