// The two passes of kernels.h: picks the instruction set of this machine and the element type of the call.
#include "cpu/backward.h"
#include "cpu/forward.h"
#include "cpu/kernels.h"
#include "cpu/ops.h"

namespace jax_flash2::cpu {
namespace {

// The best table that this machine runs.
const OpsTable& ops() {
#if defined(__x86_64__)
  if (ops_avx512() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    return *ops_avx512();
  if (ops_avx2() && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return *ops_avx2();
#endif
  return *ops_baseline();
}

template <template <class> class Pass, class E>
Status run(const Problem& p, Executor& executor) {
  return Pass<E>(p, ops().of(E{})).run(executor);
}

template <template <class> class Pass>
Status run(const Problem& p, Executor& executor) {
  switch (p.dtype) {
    case DType::kF16: return run<Pass, F16>(p, executor);
    case DType::kBF16: return run<Pass, BF16>(p, executor);
    case DType::kF32: return run<Pass, float>(p, executor);
    case DType::kF64: return run<Pass, double>(p, executor);
    default: return {"dtype must be float16, bfloat16, float32 or float64"};
  }
}

}  // namespace

Status forward(const Problem& p, Executor& executor) { return run<Forward>(p, executor); }

Status backward(const Problem& p, Executor& executor) { return run<Backward>(p, executor); }

}  // namespace jax_flash2::cpu
