# The libraries of the Python package.
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
find_package(Python REQUIRED COMPONENTS Interpreter Development.Module)
find_package(pybind11 CONFIG REQUIRED)
include(cmake/torch.cmake)
include(cmake/cuda.cmake)

# libspecens within, whose symbols stay their own.
add_library(specens_within INTERFACE)
target_link_libraries(specens_within INTERFACE specens_static specens_options Threads::Threads)
if(CMAKE_SYSTEM_NAME STREQUAL Linux)
    target_link_options(specens_within INTERFACE LINKER:--exclude-libs,libspecens.a)
endif()

# _C: operators on CPU tensors.
add_library(_C MODULE ${SPECENS_OPERATOR_SOURCES})
target_link_libraries(_C PRIVATE specens_within specens_torch)

# _C_cuda: operators on CUDA tensors.
if(SPECENS_BUILD_CUDA)
    add_library(_C_cuda MODULE ${SPECENS_CUDA_SOURCES})
    target_link_libraries(_C_cuda PRIVATE specens_options specens_torch)
    set_target_properties(_C_cuda PROPERTIES CUDA_RUNTIME_LIBRARY Static)
endif()

foreach(library IN ITEMS _C _C_cuda)
    if(TARGET ${library})
        set_target_properties(${library} PROPERTIES PREFIX "" SUFFIX ".so")
        install(TARGETS ${library} LIBRARY DESTINATION specens_kernels)
    endif()
endforeach()

# _host: host objects and build information for Python.
pybind11_add_module(_host MODULE ${SPECENS_HOST_SOURCES})
target_link_libraries(_host PRIVATE specens_within)
target_include_directories(_host SYSTEM PRIVATE ${SPECENS_TORCH_INCLUDE})
target_compile_definitions(_host PRIVATE
    "SPECENS_CUDA_ARCHITECTURES=\"${SPECENS_CUDA_ARCHITECTURES}\""
    "SPECENS_VERSION=\"${PROJECT_VERSION}\"")
install(TARGETS _host LIBRARY DESTINATION specens_kernels)

include(cmake/licences.cmake)
