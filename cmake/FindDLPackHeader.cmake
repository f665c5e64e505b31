# dlpack/dlpack.h: from the system, or from the copy that apache-tvm-ffi carries (find TvmFfi first). Defines
# CULA_DLPACK_INCLUDE_DIR.

find_path(
  CULA_DLPACK_INCLUDE_DIR dlpack/dlpack.h
  HINTS ${TVM_FFI_DLPACK_INCLUDE_DIR}
  DOC "Folder that holds dlpack/dlpack.h")
mark_as_advanced(CULA_DLPACK_INCLUDE_DIR)

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
  DLPackHeader
  REQUIRED_VARS CULA_DLPACK_INCLUDE_DIR
  FAIL_MESSAGE "dlpack/dlpack.h was not found: install libdlpack-dev, or 'pip install apache-tvm-ffi' for the Python \
that CMake finds, or set -DCULA_DLPACK_INCLUDE_DIR=")
