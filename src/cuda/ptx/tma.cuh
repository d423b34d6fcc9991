// Copies of boxes between a tensor in global memory and shared memory, by the copy engine of sm_90 (TMA).
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-tensor-copy
//
// A tensor map (cuTensorMapEncodeTiled) says where the tensor lies, the box's size and the swizzle. Elements of a box
// outside the tensor are written to shared memory as zero, and never written to global memory.
#pragma once
#include <cuda.h>

#include <cstdint>

namespace jax_flash2::cuda::ptx {

// What L2 is to do with the lines of a copy.
inline constexpr uint64_t kEvictFirst = 0x12F0000000000000, kEvictLast = 0x14F0000000000000;

__device__ __forceinline__ void prefetch_tensormap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Starts the copy of a box to `shared`; the phase of `barrier` counts its bytes, zeros too.
__device__ __forceinline__ void cp_async_bulk_tensor_4d_load(uint32_t shared, const CUtensorMap* map, int c0, int c1,
                                                             int c2, int c3, uint32_t barrier, uint64_t hint) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(hint)
      : "memory");
}

// Starts the copy of a box from `shared`, as part of this thread's open group.
__device__ __forceinline__ void cp_async_bulk_tensor_5d_load(uint32_t shared, const CUtensorMap* map, int c0, int c1,
                                                             int c2, int c3, int c4, uint32_t barrier, uint64_t hint) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "l"(hint)
      : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_4d_store(const CUtensorMap* map, int c0, int c1, int c2, int c3,
                                                              uint32_t shared) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
               "r"(shared), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
               : "memory");
}

// Starts the copy of `bytes` contiguous bytes to `shared`; the phase of `barrier` counts them. Both addresses and `bytes`
// are multiples of 16.
__device__ __forceinline__ void cp_async_bulk_load(uint32_t shared, const void* global, int bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(global), "r"(bytes), "r"(barrier)
               : "memory");
}

// Starts adding `bytes` bytes of floats from `shared` to global memory, as part of this thread's open group. Both
// addresses and `bytes` are multiples of 16.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-reduce-async-bulk
__device__ __forceinline__ void cp_reduce_async_bulk_add_f32(float* global, uint32_t shared, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global), "r"(shared),
               "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void cp_async_bulk_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until at most kPending of this thread's groups, the latest, are under way; _read: until all others have been
// read from shared memory.
template <int kPending>
__device__ __forceinline__ void cp_async_bulk_wait_group() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}
template <int kPending>
__device__ __forceinline__ void cp_async_bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Orders this thread's accesses to shared memory before those of the copy engine and the tensor core that follow.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The same between this thread's accesses to global memory and those of the copy engine.
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

}  // namespace jax_flash2::cuda::ptx
