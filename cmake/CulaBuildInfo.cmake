# What the Python package says of its own build: the generated module cula/gdn/_build.py, read by `cula-gdn info`.

find_package(Git QUIET)
set(CULA_COMMIT "unknown")
if(Git_FOUND)
  execute_process(
    COMMAND "${GIT_EXECUTABLE}" -C "${CMAKE_CURRENT_SOURCE_DIR}" describe --always --dirty --abbrev=12
    OUTPUT_VARIABLE commit
    RESULT_VARIABLE status
    OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(status EQUAL 0)
    set(CULA_COMMIT "${commit}")
  endif()
endif()

set(CULA_CUDA_DESCRIPTION "none")
if(CULA_WITH_CUDA)
  list(JOIN CULA_CUDA_ARCHS ", " archs)
  set(CULA_CUDA_DESCRIPTION "CUDA ${CMAKE_CUDA_COMPILER_VERSION} for sm ${archs}")
endif()
list(JOIN CULA_ISAS ", " CULA_ISA_DESCRIPTION)
set(CULA_BUILD_INFO "${CMAKE_CURRENT_BINARY_DIR}/_build.py")
configure_file("${CMAKE_CURRENT_SOURCE_DIR}/cmake/_build.py.in" "${CULA_BUILD_INFO}" @ONLY)
