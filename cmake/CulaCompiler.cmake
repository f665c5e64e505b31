# Compiler settings of the library's own code: the target cula_compile_options. Nothing here reaches its users.

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_CXX_FLAGS_RELEASE "-O3 -DNDEBUG")

find_program(CULA_CCACHE ccache)
if(CULA_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER "${CULA_CCACHE}")
  set(CMAKE_CUDA_COMPILER_LAUNCHER "${CULA_CCACHE}")
endif()

add_library(cula_compile_options INTERFACE)
# Results must not depend on the optimiser's freedom: no -ffast-math anywhere, and a product and a sum fuse only where
# the source writes them as one expression.
target_compile_options(cula_compile_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-ffp-contract=on>)
# GCC 12 sees overlapping copies in the inlined operator+ of std::string (its bug 105651, fixed in GCC 13).
target_compile_options(
  cula_compile_options
  INTERFACE $<$<AND:$<COMPILE_LANG_AND_ID:CXX,GNU>,$<VERSION_LESS:$<CXX_COMPILER_VERSION>,13>>:-Wno-restrict>)
if(CULA_WERROR)
  target_compile_options(cula_compile_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Werror>)
endif()

if(CULA_SANITIZE)
  # Directory-wide, so that the tests and GoogleTest are instrumented too.
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${CULA_SANITIZE}>
                      $<$<COMPILE_LANGUAGE:CXX>:-fno-omit-frame-pointer>
                      $<$<COMPILE_LANGUAGE:CXX>:-fno-sanitize-recover=all> $<$<COMPILE_LANGUAGE:CXX>:-g1>)
  add_link_options(-fsanitize=${CULA_SANITIZE})
endif()
