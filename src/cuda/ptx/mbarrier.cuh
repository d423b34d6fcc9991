// Arrival counters in shared memory, as sm_80 has them. Unlike a bar.sync, arriving and waiting are two instructions, and
// a warp may work in between.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-mbarrier
#pragma once
#include <cstdint>

namespace jax_flash2::cuda::ptx {

// A phase ends with the `count`-th arrival; the first phase has parity 0.
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// One arrival. What this thread, and threads it has synchronised with, did before is seen by who waits for the phase.
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  [[maybe_unused]] uint64_t state;
  asm volatile("mbarrier.arrive.shared.b64 %0, [%1];" : "=l"(state) : "r"(barrier) : "memory");
}

// Whether the phase of this parity has ended; the one before it must have.
__device__ __forceinline__ bool mbarrier_test_wait_parity(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile("{\n .reg .pred p;\n mbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
               : "=r"(done)
               : "r"(barrier), "r"(parity)
               : "memory");
  return done != 0;
}

// ---- sm_90 ----

// Makes this thread's mbarrier_init visible to the copy engine.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// One arrival, and the phase ends no earlier than `bytes` more bytes of asynchronous copies have come.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits for the end of the phase of this parity: try_wait, which sleeps for a while before it answers no, until it
// answers yes. The loop is PTX too, because round one in C++ ptxas keeps registers that a kernel full of accumulators does
// not have (588 bytes of spills). With JAX_FLASH2_TRAP_HANGS defined a wait that cannot end kills the kernel.
__device__ __forceinline__ void mbarrier_wait_parity(uint32_t barrier, uint32_t parity) {
#ifdef JAX_FLASH2_TRAP_HANGS
  asm volatile(
      "{\n .reg .pred p;\n .reg .u32 tries;\n mov.u32 tries, 0;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n @p bra done;\n"
      " add.u32 tries, tries, 1;\n setp.gt.u32 p, tries, 4194304;\n @p trap;\n bra again;\ndone:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
#else
  asm volatile(
      "{\n .reg .pred p;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n @p bra done;\n bra again;\ndone:\n}" ::"r"(
          barrier),
      "r"(parity)
      : "memory");
#endif
}

}  // namespace jax_flash2::cuda::ptx
