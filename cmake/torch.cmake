# specens_torch: the headers and the library of the installed torch, by its stable ABI only.
# find_package(Torch) is not used: with a CUDA build of torch it asks for the whole CUDA toolkit.
execute_process(
    COMMAND ${Python_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/_build_backend/torch_location.py
    OUTPUT_VARIABLE torch_folder
    OUTPUT_STRIP_TRAILING_WHITESPACE
    COMMAND_ERROR_IS_FATAL ANY)
message(STATUS "torch: ${torch_folder}")
set(SPECENS_TORCH_INCLUDE ${torch_folder}/include)

add_library(specens_torch INTERFACE)
target_include_directories(specens_torch SYSTEM INTERFACE ${SPECENS_TORCH_INCLUDE})
# 2.11: the oldest torch that the built extension loads in.
target_compile_definitions(specens_torch INTERFACE
    TORCH_TARGET_VERSION=0x020b000000000000ULL TORCH_STABLE_ONLY)
target_link_libraries(specens_torch INTERFACE
    ${torch_folder}/lib/${CMAKE_SHARED_LIBRARY_PREFIX}torch_cpu${CMAKE_SHARED_LIBRARY_SUFFIX})
if(CMAKE_SYSTEM_NAME STREQUAL Linux)
    target_link_options(specens_torch INTERFACE LINKER:-z,defs)
endif()
if(APPLE)
    # torch's library is named @rpath/libtorch_cpu.dylib, and lies beside this package.
    target_link_options(specens_torch INTERFACE LINKER:-rpath,@loader_path/../torch/lib)
endif()
