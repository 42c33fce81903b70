# What a wheel holds beside its own code: licence texts under the package's folder, and a bill of materials (CycloneDX)
# in its metadata, both of the releases that it was built with.
execute_process(
    COMMAND ${Python_EXECUTABLE} -c
        "import importlib.metadata as m; d = m.distribution('pybind11'); print(d.version, next(d.locate_file(f) for f in d.files if f.name == 'LICENSE'))"
    OUTPUT_VARIABLE found
    OUTPUT_STRIP_TRAILING_WHITESPACE
    COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCH "^([^ ]+) (.*)$" found "${found}")
set(SPECENS_PYBIND11_VERSION ${CMAKE_MATCH_1})
configure_file(${CMAKE_MATCH_2} ${CMAKE_CURRENT_BINARY_DIR}/pybind11.txt COPYONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/pybind11.txt DESTINATION ${SKBUILD_METADATA_DIR}/licenses)
if(SPECENS_BUILD_CUDA)
    string(CONCAT SPECENS_CUDA_COMPONENT ",\n    {\"type\": \"library\", \"name\": \"cudart_static\", "
        "\"version\": \"${CMAKE_CUDA_COMPILER_VERSION}\", \"licenses\": [{\"license\": {\"name\": \"NVIDIA CUDA Toolkit EULA\"}}]}")
endif()
configure_file(cmake/sbom.cdx.json.in sbom/specens-kernels.cdx.json @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/sbom/specens-kernels.cdx.json DESTINATION ${SKBUILD_METADATA_DIR}/sboms)
