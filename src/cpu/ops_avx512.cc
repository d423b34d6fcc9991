// The inner loops for x86-64 with AVX-512; needs -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma.
#include "cpu/ops.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include "cpu/ops.inl"
namespace jax_flash2::cpu {
const OpsTable* ops_avx512() { return &kTable; }
}  // namespace jax_flash2::cpu
#else
namespace jax_flash2::cpu {
const OpsTable* ops_avx512() { return nullptr; }
}  // namespace jax_flash2::cpu
#endif
