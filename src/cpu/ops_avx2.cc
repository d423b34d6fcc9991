// The inner loops for x86-64 with AVX2 and FMA; needs -mavx2 -mfma.
#include "cpu/ops.h"

#if defined(__AVX2__) && defined(__FMA__)
#include "cpu/ops.inl"
namespace jax_flash2::cpu {
const OpsTable* ops_avx2() { return &kTable; }
}  // namespace jax_flash2::cpu
#else
namespace jax_flash2::cpu {
const OpsTable* ops_avx2() { return nullptr; }
}  // namespace jax_flash2::cpu
#endif
