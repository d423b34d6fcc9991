// The inner loops for any machine of the target architecture.
#include "cpu/ops.inl"

namespace jax_flash2::cpu {

const OpsTable* ops_baseline() { return &kTable; }

}  // namespace jax_flash2::cpu
