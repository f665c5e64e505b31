# The CUTLASS and CuTe headers: -DCULA_CUTLASS_INCLUDE_DIR=, or the nvidia-cutlass wheel of the Python that CMake found.
# Defines CutlassHeaders_FOUND and CULA_CUTLASS_INCLUDE_DIR.

if(NOT CULA_CUTLASS_INCLUDE_DIR AND Python3_EXECUTABLE)
  # find_spec does not import the package, which would pull in the wheel's own, unneeded dependencies.
  execute_process(
    COMMAND "${Python3_EXECUTABLE}" -c
            "import importlib.util as u; print(u.find_spec('cutlass_library').submodule_search_locations[0])"
    OUTPUT_VARIABLE cutlass_package
    OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
find_path(
  CULA_CUTLASS_INCLUDE_DIR cutlass/cutlass.h
  HINTS "${cutlass_package}/source/include"
  DOC "Folder that holds cutlass/cutlass.h and cute/tensor.hpp")
mark_as_advanced(CULA_CUTLASS_INCLUDE_DIR)

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
  CutlassHeaders
  REQUIRED_VARS CULA_CUTLASS_INCLUDE_DIR
  FAIL_MESSAGE "the CUTLASS headers were not found: 'pip install --no-deps nvidia-cutlass==4.2.0.0' for the Python that \
CMake finds, or set -DCULA_CUTLASS_INCLUDE_DIR=")
