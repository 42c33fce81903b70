# The sources, found by name, so that a new operation needs no line here:
#   csrc/NAME/*.cpp                          -> libspecens, which knows neither torch nor Python
#   csrc/NAME/rows_{avx512,avx2,neon}.cpp    -> libspecens, on processors of that kind, with the flags of that set
#   csrc/operators/*.cpp                     -> _C, operators of torch over libspecens
#   csrc/NAME/*.cu                           -> _C_cuda
#   csrc/bindings/*.cpp                      -> _host, with csrc/NAME/*bindings.cpp
file(GLOB SPECENS_CORE_SOURCES CONFIGURE_DEPENDS csrc/*/*.cpp)
file(GLOB SPECENS_OPERATOR_SOURCES CONFIGURE_DEPENDS csrc/operators/*.cpp)
file(GLOB SPECENS_CUDA_SOURCES CONFIGURE_DEPENDS csrc/*/*.cu)
file(GLOB SPECENS_HOST_SOURCES CONFIGURE_DEPENDS csrc/bindings/*.cpp csrc/*/*bindings.cpp)
file(GLOB avx512_sources CONFIGURE_DEPENDS csrc/*/rows_avx512.cpp)
file(GLOB avx2_sources CONFIGURE_DEPENDS csrc/*/rows_avx2.cpp)
file(GLOB neon_sources CONFIGURE_DEPENDS csrc/*/rows_neon.cpp)
list(REMOVE_ITEM SPECENS_CORE_SOURCES ${SPECENS_OPERATOR_SOURCES} ${SPECENS_HOST_SOURCES}
    ${avx512_sources} ${avx2_sources} ${neon_sources})

# Those that only some of the processors may run, which are compiled for, are kept apart.
set(SPECENS_VECTOR_SOURCES "")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64|amd64")
    set(SPECENS_VECTOR_SOURCES ${avx512_sources} ${avx2_sources})
    set_property(SOURCE ${avx512_sources} PROPERTY
        COMPILE_OPTIONS -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx2 -mfma -mf16c -ffp-contract=fast)
    set_property(SOURCE ${avx2_sources} PROPERTY COMPILE_OPTIONS -mavx2 -mfma -mf16c -ffp-contract=fast)
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64|ARM64")
    list(APPEND SPECENS_CORE_SOURCES ${neon_sources})
    set_property(SOURCE ${neon_sources} PROPERTY COMPILE_OPTIONS -ffp-contract=fast)
endif()
