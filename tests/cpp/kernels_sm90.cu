// The sm_90 kernels under the same cases as kernels.cu.
#define JAX_FLASH2_TEST_SM90
#include "kernels.cu"
