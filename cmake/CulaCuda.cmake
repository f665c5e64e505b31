# GPU backends. Sets CULA_WITH_CUDA and CULA_CUDA_LIBRARIES, and appends to core_objects.
#
# Code under csrc/gdn/cuda is compiled for every architecture of CULA_CUDA_ARCHS, with PTX of the highest for GPUs to
# come; code under csrc/gdn/sm90 uses instructions of sm_90a alone and is compiled for that, when it is in the list.

if(NOT cuda_sources)
  if(CULA_CUDA STREQUAL "ON")
    message(FATAL_ERROR "CULA_CUDA=ON, but this source tree holds no GPU code (csrc/gdn/cuda)")
  endif()
  return()
endif()

include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  if(CULA_CUDA STREQUAL "ON")
    message(FATAL_ERROR "CULA_CUDA=ON, but no nvcc was found; set -DCMAKE_CUDA_COMPILER=")
  endif()
  message(STATUS "GPU backends: none (no nvcc)")
  return()
endif()
# Architectures are passed per target below: CMake's own variable takes no "90a" in the oldest supported version.
set(CMAKE_CUDA_ARCHITECTURES OFF)
enable_language(CUDA)
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_FLAGS_RELEASE "-O3 -DNDEBUG")
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
find_package(CUDAToolkit REQUIRED)

set(cuda_gencode "")
set(highest 0)
foreach(arch IN LISTS CULA_CUDA_ARCHS)
  if(NOT arch MATCHES "^([0-9]+)[af]?$")
    message(FATAL_ERROR "CULA_CUDA_ARCHS: '${arch}' is not an architecture such as 80 or 90a")
  endif()
  # The general kernels use no instruction of one architecture alone: plain sm_90 code stands for 90a here.
  set(number ${CMAKE_MATCH_1})
  list(APPEND cuda_gencode "-gencode=arch=compute_${number},code=sm_${number}")
  if(number GREATER highest)
    set(highest ${number})
  endif()
endforeach()
list(APPEND cuda_gencode "-gencode=arch=compute_${highest},code=compute_${highest}")

add_library(cula_cuda_options INTERFACE)
target_compile_definitions(cula_cuda_options INTERFACE CULA_WITH_CUDA)
target_compile_options(
  cula_cuda_options
  INTERFACE $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr;--expt-extended-lambda;-lineinfo>
            $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall>)
if(CULA_PTXAS_VERBOSE)  # what tools/check_ptxas.py reads
  target_compile_options(cula_cuda_options INTERFACE $<$<COMPILE_LANGUAGE:CUDA>:-Xptxas=-v>)
endif()

function(cula_add_gpu_library name gencode)
  add_library(${name} OBJECT ${ARGN})
  target_link_libraries(${name} PUBLIC cula_gdn_interface PRIVATE cula_compile_options cula_cuda_options
                                                                  CUDA::toolkit)
  target_compile_options(${name} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:${gencode}>")
  set_target_properties(${name} PROPERTIES POSITION_INDEPENDENT_CODE ON CUDA_ARCHITECTURES OFF)
endfunction()

# The forward scan fills its registers: at its usual eagerness (5) ptxas (13.0) hoists so much that it spills an address,
# in these types.
set(forward_scans ${cuda_sources})
list(FILTER forward_scans INCLUDE REGEX "instantiations/(forward|checkpointed)_scan_(bf16|fp32)")
set_source_files_properties(${forward_scans} PROPERTIES COMPILE_OPTIONS "-Xptxas=--register-usage-level=3")
cula_add_gpu_library(cula_gdn_cuda "${cuda_gencode}" ${cuda_sources})
list(APPEND core_objects $<TARGET_OBJECTS:cula_gdn_cuda>)
if(sm90_sources AND "90a" IN_LIST CULA_CUDA_ARCHS)
  cula_add_gpu_library(cula_gdn_sm90 "-gencode=arch=compute_90a,code=sm_90a" ${sm90_sources})
  list(APPEND core_objects $<TARGET_OBJECTS:cula_gdn_sm90>)
  target_compile_definitions(cula_cuda_options INTERFACE CULA_WITH_SM90)
  # See csrc/common/device/hand_over.cuh.
  target_compile_definitions(cula_gdn_sm90 PRIVATE $<$<BOOL:${CULA_RACECHECK}>:CULA_RACECHECK>)
  target_compile_definitions(cula_gdn_core PRIVATE CULA_WITH_SM90)
endif()
target_compile_definitions(cula_gdn_core PRIVATE CULA_WITH_CUDA)
# The driver library is not linked, so that the library loads on machines without a GPU.
set(CULA_CUDA_LIBRARIES CUDA::cudart_static)
set(CULA_WITH_CUDA ON)
message(STATUS "GPU backends: cuda for ${CULA_CUDA_ARCHS}, nvcc ${CMAKE_CUDA_COMPILER_VERSION}")
