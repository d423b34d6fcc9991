# The translation units of the CPU kernels, relative to the repository root, and the flags that each needs. The same inner
# loops are compiled once per instruction set and chosen at run time; a file that gets no flags of its own still compiles.
set(JAX_FLASH2_CPU_SOURCES src/cpu/dispatch.cc src/cpu/ops_baseline.cc src/cpu/ops_avx2.cc src/cpu/ops_avx512.cc)
set_source_files_properties(${JAX_FLASH2_CPU_SOURCES} PROPERTIES COMPILE_OPTIONS "-O3")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  set_source_files_properties(src/cpu/ops_avx2.cc PROPERTIES COMPILE_OPTIONS "-O3;-mavx2;-mfma")
  set_source_files_properties(src/cpu/ops_avx512.cc PROPERTIES
    COMPILE_OPTIONS "-O3;-mavx512f;-mavx512bw;-mavx512dq;-mavx512vl;-mfma")
endif()
