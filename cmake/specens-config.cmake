# specens::specens, the shared library, and specens::static. Found with
#   find_package(specens CONFIG PATHS <what specens_kernels.get_library() says>/cmake)
get_filename_component(specens_lib "${CMAKE_CURRENT_LIST_DIR}/../.." ABSOLUTE)
get_filename_component(specens_include "${specens_lib}/../include" ABSOLUTE)
foreach(kind IN ITEMS specens static)
    if(NOT TARGET specens::${kind})
        add_library(specens::${kind} UNKNOWN IMPORTED)
        set_target_properties(specens::${kind} PROPERTIES INTERFACE_INCLUDE_DIRECTORIES "${specens_include}")
    endif()
endforeach()
set_target_properties(specens::specens PROPERTIES IMPORTED_LOCATION "${specens_lib}/libspecens.so")
set_target_properties(specens::static PROPERTIES
    IMPORTED_LOCATION "${specens_lib}/libspecens.a" INTERFACE_LINK_LIBRARIES "stdc++;m;pthread")
set(specens_FOUND TRUE)
