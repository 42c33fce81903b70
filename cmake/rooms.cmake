# The sources of every room, found by name, so that a new room needs no line here:
#   csrc/NAME/*.cpp                     -> _C
#   csrc/NAME/rows_{avx512,avx2}.cpp    -> _C, with the flags of that instruction set
#   csrc/NAME/*.cu                      -> _C_cuda
#   csrc/bindings/*.cpp                 -> _host
#   csrc/NAME/*.cpp with a bindings.cpp -> _host, not _C: a room that is a host object
file(GLOB SPECENS_CPU_SOURCES CONFIGURE_DEPENDS csrc/*/*.cpp)
file(GLOB SPECENS_CUDA_SOURCES CONFIGURE_DEPENDS csrc/*/*.cu)
file(GLOB SPECENS_HOST_SOURCES CONFIGURE_DEPENDS csrc/bindings/*.cpp)
file(GLOB host_rooms CONFIGURE_DEPENDS csrc/*/bindings.cpp)
foreach(bindings IN LISTS host_rooms)
    cmake_path(GET bindings PARENT_PATH room)
    file(GLOB room_sources CONFIGURE_DEPENDS ${room}/*.cpp)
    list(APPEND SPECENS_HOST_SOURCES ${room_sources})
endforeach()
file(GLOB avx512_sources CONFIGURE_DEPENDS csrc/*/rows_avx512.cpp)
file(GLOB avx2_sources CONFIGURE_DEPENDS csrc/*/rows_avx2.cpp)
list(REMOVE_ITEM SPECENS_CPU_SOURCES ${SPECENS_HOST_SOURCES} ${avx512_sources} ${avx2_sources})

set(SPECENS_VECTOR_SOURCES "")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64|amd64")
    set(SPECENS_VECTOR_SOURCES ${avx512_sources} ${avx2_sources})
    set_property(SOURCE ${avx512_sources} PROPERTY
        COMPILE_OPTIONS -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx2 -mfma -mf16c)
    set_property(SOURCE ${avx2_sources} PROPERTY COMPILE_OPTIONS -mavx2 -mfma -mf16c)
endif()
