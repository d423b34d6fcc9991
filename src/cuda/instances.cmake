# THE list of what is compiled for CUDA: architecture | pass | dtype | padded head dim of q and k | of v. Each row is one unit
# with both bodies (plain, general); the dispatcher, the module's instances() and the tests' parameters follow from it. The
# dispatcher takes the first row that is wide enough.
set(JAX_FLASH2_KERNELS "sm80;sm90" CACHE STRING
    "Kernels to compile: sm80 for every device from 8.0 up, sm90 for what Hopper does better")
set(JAX_FLASH2_PASSES_sm80 forward backward)
set(JAX_FLASH2_PASSES_sm90 forward backward)
set(JAX_FLASH2_VALUE_DIMS_sm90_192 128)  # narrower values that have a row of their own

set(JAX_FLASH2_CUDA_INSTANCES "")
foreach(head_dim IN LISTS JAX_FLASH2_HEAD_DIMS)
  foreach(dtype bf16 f16)
    foreach(arch IN LISTS JAX_FLASH2_KERNELS)
      foreach(pass IN LISTS JAX_FLASH2_PASSES_${arch})
        foreach(value_dim ${JAX_FLASH2_VALUE_DIMS_${arch}_${head_dim}} ${head_dim})
          list(APPEND JAX_FLASH2_CUDA_INSTANCES "${arch}|${pass}|${dtype}|${head_dim}|${value_dim}")
        endforeach()
      endforeach()
    endforeach()
  endforeach()
endforeach()
