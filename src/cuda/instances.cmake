# THE list of what is compiled for CUDA: architecture | pass | dtype | padded head dim of q and k | of v. Each row is one unit
# with all its bodies; the dispatcher, the module's instances() and the tests' parameters follow from it. The
# dispatcher takes the first row that is wide enough.
set(JAX_FLASH2_KERNELS "sm80;sm90;fma" CACHE STRING
    "Kernels to compile: sm80 for every device from 8.0 up, sm90 for what Hopper does better, fma for float32 and float64")
set(JAX_FLASH2_PASSES_sm80 forward backward)
set(JAX_FLASH2_PASSES_sm90 forward backward)
set(JAX_FLASH2_PASSES_fma forward backward)
set(JAX_FLASH2_DTYPES_sm80 bf16 f16)
set(JAX_FLASH2_DTYPES_sm90 bf16 f16)
set(JAX_FLASH2_DTYPES_fma f32 f64)
set(JAX_FLASH2_VALUE_DIMS_sm90_192 128)  # narrower values that have a row of their own
# Some widths only: the next wider one serves the others, which cost no more, for panels of zeros are skipped.
set(JAX_FLASH2_WIDTHS_fma_96 128)
set(JAX_FLASH2_WIDTHS_fma_192 256)

set(JAX_FLASH2_CUDA_INSTANCES "")
foreach(wanted IN LISTS JAX_FLASH2_HEAD_DIMS)
  foreach(arch IN LISTS JAX_FLASH2_KERNELS)
    set(head_dim ${wanted})
    if(JAX_FLASH2_WIDTHS_${arch}_${wanted})
      set(head_dim ${JAX_FLASH2_WIDTHS_${arch}_${wanted}})
    endif()
    foreach(dtype IN LISTS JAX_FLASH2_DTYPES_${arch})
      foreach(pass IN LISTS JAX_FLASH2_PASSES_${arch})
        foreach(value_dim ${JAX_FLASH2_VALUE_DIMS_${arch}_${head_dim}} ${head_dim})
          list(APPEND JAX_FLASH2_CUDA_INSTANCES "${arch}|${pass}|${dtype}|${head_dim}|${value_dim}")
        endforeach()
      endforeach()
    endforeach()
  endforeach()
endforeach()
list(REMOVE_DUPLICATES JAX_FLASH2_CUDA_INSTANCES)
