// The sm_90 backward under the same cases as kernels_backward.cu, which see for how to run it. Of the head dims'
// instances those in JAX_FLASH2_TEST_DIMS are compiled in; cases that need others are answered by an error.
#include <type_traits>

#include "cuda/element.h"
#include "cuda/launch.h"
#include "cuda/sm90/backward.cuh"

#ifndef JAX_FLASH2_TEST_DIMS
#define JAX_FLASH2_TEST_DIMS 64, 96, 128, 192, 256
#endif

namespace jax_flash2::cuda {

template <class Element, int kHeadDim, int... kRest>
Status backward_by_dim(const Problem& p, cudaStream_t stream) {
  if (p.D <= kHeadDim) return sm90::backward<Element, kHeadDim>(p, stream);
  if constexpr (sizeof...(kRest) > 0) {
    return backward_by_dim<Element, kRest...>(p, stream);
  } else {
    return {"no instance of this head dim"};
  }
}

Status backward(const Problem& p, cudaStream_t stream) {
  return p.dtype == DType::kBF16 ? backward_by_dim<bf16, JAX_FLASH2_TEST_DIMS>(p, stream)
                                 : backward_by_dim<f16, JAX_FLASH2_TEST_DIMS>(p, stream);
}

}  // namespace jax_flash2::cuda

#include "kernels_backward.cu"
