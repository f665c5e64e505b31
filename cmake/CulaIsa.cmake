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

if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  set(CULA_ISAS generic avx2 avx512 avx512_bf16 amx_bf16)
else()
  set(CULA_ISAS generic)
endif()

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
