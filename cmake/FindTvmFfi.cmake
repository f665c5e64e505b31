# apache-tvm-ffi, asked of the Python interpreter that CMake found. Defines TvmFfi_FOUND, TVM_FFI_INCLUDE_DIRS,
# TVM_FFI_LIBRARY_DIR and the target tvm_ffi::shared.

if(Python3_EXECUTABLE)
  foreach(pair "includedir;TVM_FFI_INCLUDE_DIR" "dlpack-includedir;TVM_FFI_DLPACK_INCLUDE_DIR"
               "libfiles;TVM_FFI_LIBRARY")
    list(GET pair 0 question)
    list(GET pair 1 variable)
    execute_process(
      COMMAND "${Python3_EXECUTABLE}" -m tvm_ffi.config --${question}
      OUTPUT_VARIABLE ${variable}
      RESULT_VARIABLE status
      OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    if(NOT status EQUAL 0)
      unset(${variable})
    endif()
  endforeach()
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(TvmFfi REQUIRED_VARS TVM_FFI_LIBRARY TVM_FFI_INCLUDE_DIR TVM_FFI_DLPACK_INCLUDE_DIR)

if(TvmFfi_FOUND)
  set(TVM_FFI_INCLUDE_DIRS "${TVM_FFI_INCLUDE_DIR}" "${TVM_FFI_DLPACK_INCLUDE_DIR}")
  get_filename_component(TVM_FFI_LIBRARY_DIR "${TVM_FFI_LIBRARY}" DIRECTORY)
  if(NOT TARGET tvm_ffi::shared)
    add_library(tvm_ffi::shared SHARED IMPORTED)
    set_target_properties(tvm_ffi::shared PROPERTIES IMPORTED_LOCATION "${TVM_FFI_LIBRARY}"
                                                     INTERFACE_INCLUDE_DIRECTORIES "${TVM_FFI_INCLUDE_DIRS}")
  endif()
endif()
