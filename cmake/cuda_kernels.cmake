# The library of CUDA kernels: one generated unit a row of src/cuda/instances.cmake.

get_filename_component(nvcc_real ${JAX_FLASH2_NVCC} REALPATH)
get_filename_component(cuda_root ${nvcc_real}/../.. ABSOLUTE)
if(EXISTS ${cuda_root}/lib/libcudart_static.a)
  string(APPEND CMAKE_CUDA_FLAGS " -L${cuda_root}/lib")  # the wheels have lib, where nvcc looks into lib64
endif()
set(CMAKE_CUDA_COMPILER ${JAX_FLASH2_NVCC})
set(CMAKE_CUDA_ARCHITECTURES OFF)  # ours are below: one PTX for several machine codes, which CMake cannot say
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
enable_language(CUDA)

# What the units of each architecture in instances.cmake are compiled to.
set(gencode_sm80 -gencode=arch=compute_80,code=compute_80)
foreach(arch IN LISTS JAX_FLASH2_CUDA_ARCHITECTURES)
  list(APPEND gencode_sm80 -gencode=arch=compute_80,code=sm_${arch})
endforeach()
set(gencode_fma ${gencode_sm80})
set(gencode_packs ${gencode_sm80})
list(TRANSFORM gencode_packs REPLACE "compute_80,code=sm_90$" "compute_90,code=sm_90")
set(gencode_sm90 -gencode=arch=compute_90a,code=sm_90a)  # WGMMA and TMA: this machine code and no PTX

include(src/cuda/instances.cmake)
set(generated ${CMAKE_CURRENT_BINARY_DIR}/generated)
set(units "")
set(table "")
foreach(row IN LISTS JAX_FLASH2_CUDA_INSTANCES)
  string(REPLACE "|" ";" fields ${row})
  list(GET fields 0 ARCH)
  list(GET fields 1 PASS)
  list(GET fields 2 DTYPE)
  list(GET fields 3 HEAD_DIM)
  list(GET fields 4 VALUE_DIM)
  set(unit ${generated}/${ARCH}_${PASS}_${DTYPE}_${HEAD_DIM}_${VALUE_DIM}.cu)
  configure_file(src/cuda/instance.cu.in ${unit} @ONLY)
  set_source_files_properties(${unit} PROPERTIES COMPILE_OPTIONS "${gencode_${ARCH}}")
  list(APPEND units ${unit})
  string(APPEND table "JAX_FLASH2_INSTANCE(${ARCH}, ${PASS}, ${DTYPE}, ${HEAD_DIM}, ${VALUE_DIM})\n")
endforeach()
file(CONFIGURE OUTPUT ${generated}/instances.inc CONTENT "${table}" @ONLY)

# Units that are not generated. Where kernels may overlap, machine code of 9.0 is from a PTX of its own.
set_source_files_properties(src/cuda/extents.cu PROPERTIES COMPILE_OPTIONS "${gencode_sm80}")
set_source_files_properties(src/cuda/packs.cu PROPERTIES COMPILE_OPTIONS "${gencode_packs}")
set_source_files_properties(src/cuda/sm90/queue.cu PROPERTIES COMPILE_OPTIONS "${gencode_sm90}")
file(GLOB host_sources CONFIGURE_DEPENDS src/cuda/*.cc)
add_library(
  jax_flash2_cuda_kernels STATIC ${units} src/cuda/extents.cu src/cuda/packs.cu src/cuda/sm90/queue.cu ${host_sources})
target_include_directories(jax_flash2_cuda_kernels PRIVATE ${generated})
target_include_directories(jax_flash2_cuda_kernels SYSTEM PUBLIC ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
target_link_libraries(jax_flash2_cuda_kernels PRIVATE jax_flash2_options)
target_compile_options(
  jax_flash2_cuda_kernels PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr -Xptxas=-v>)
set(judge ${Python_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/cmake/nvcc_checked.py)
if(JAX_FLASH2_STRICT)
  list(APPEND judge --strict)
endif()
list(APPEND judge ${CMAKE_CURRENT_SOURCE_DIR}/cmake/spill_allowances.txt)
set_target_properties(jax_flash2_cuda_kernels PROPERTIES CUDA_COMPILER_LAUNCHER "${judge}")
