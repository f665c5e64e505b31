include("${CMAKE_CURRENT_LIST_DIR}/cula_gdnTargets.cmake")
