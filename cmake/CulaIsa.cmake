# The CPU kernels are compiled once per instruction set, from the same files, and chosen at run time.
#
#   cula_add_isa_libraries(<prefix> <sources> <objects>)
#
# adds one object library <prefix>_<isa> per instruction set, compiled with CULA_ISA=<isa>, and appends its objects to
# the list <objects>. The kernels put everything into a namespace named after CULA_ISA: a template or inline function
# outside of it would exist once per instruction set under one name, and the linker keeps an arbitrary one of them.
# tools/check_isa_symbols.py verifies that.

set(CULA_ISA_FLAGS_generic "")
set(CULA_ISA_FLAGS_avx2 -mavx2 -mfma -mf16c)
set(CULA_ISA_FLAGS_avx512 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c -mprefer-vector-width=512)
set(CULA_ISA_FLAGS_avx512_bf16 ${CULA_ISA_FLAGS_avx512} -mavx512bf16)
set(CULA_ISA_FLAGS_amx_bf16 ${CULA_ISA_FLAGS_avx512_bf16} -mamx-tile -mamx-bf16)

# In ascending order, as CpuIsa in csrc/common/host/cpu_features.h: a build tells the code which ones it has by a mask.
set(known_isas generic avx2 avx512 avx512_bf16 amx_bf16)
if(NOT CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  set(known_isas generic)
endif()
set(CULA_CPU_ISAS "" CACHE STRING "Instruction sets to compile the CPU kernels for, besides generic; empty: all")
set(CULA_ISAS "")
set(CULA_ISA_MASK 0)
set(bit 1)
foreach(isa IN LISTS known_isas)
  if(CULA_CPU_ISAS STREQUAL "" OR isa STREQUAL "generic" OR isa IN_LIST CULA_CPU_ISAS)
    list(APPEND CULA_ISAS ${isa})
    math(EXPR CULA_ISA_MASK "${CULA_ISA_MASK} + ${bit}")
  endif()
  math(EXPR bit "${bit} * 2")
endforeach()
foreach(isa IN LISTS CULA_CPU_ISAS)
  if(NOT isa IN_LIST known_isas)
    message(FATAL_ERROR "CULA_CPU_ISAS: expected some of ${known_isas}, got ${isa}")
  endif()
endforeach()

function(cula_add_isa_libraries prefix sources objects)
  if(NOT sources)
    return()
  endif()
  set(all ${${objects}})
  foreach(isa IN LISTS CULA_ISAS)
    set(target ${prefix}_${isa})
    add_library(${target} OBJECT ${sources})
    target_link_libraries(${target} PUBLIC cula_gdn_interface PRIVATE cula_compile_options)
    target_compile_options(${target} PRIVATE ${CULA_ISA_FLAGS_${isa}})
    target_compile_definitions(${target} PRIVATE CULA_ISA=${isa})
    set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE ON)
    list(APPEND all $<TARGET_OBJECTS:${target}>)
  endforeach()
  set(${objects} ${all} PARENT_SCOPE)
endfunction()
