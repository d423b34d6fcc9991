# THE list of what is compiled for CUDA: architecture | pass | dtype | padded head dim. Each row is one unit with both
# bodies (plain, general); the dispatcher, the module's instances() and the tests' parameters follow from it.
set(JAX_FLASH2_CUDA_INSTANCES "")
foreach(head_dim IN LISTS JAX_FLASH2_HEAD_DIMS)
  foreach(dtype bf16 f16)
    foreach(pass forward backward)
      list(APPEND JAX_FLASH2_CUDA_INSTANCES "sm80|${pass}|${dtype}|${head_dim}")
    endforeach()
  endforeach()
endforeach()
