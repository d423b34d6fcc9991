# The translation units of the CPU kernels, relative to the repository root, and the flags that each needs.
set(JAX_FLASH2_CPU_SOURCES src/cpu/kernels.cc)
