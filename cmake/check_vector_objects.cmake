# Fails if an object that was compiled for a certain instruction set defines a symbol that the linker may share
# (an inline function or a template that was not inlined): older processors could then end up in that copy.
# Run as: cmake -D NM=nm -D OBJECTS=a.o;b.o -P check_vector_objects.cmake
foreach(object IN LISTS OBJECTS)
    execute_process(COMMAND ${NM} -C --defined-only ${object} OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
    string(REGEX MATCHALL "[^\n]* [WVu] [^\n]*" shared "${symbols}")
    if(shared)
        list(JOIN shared "\n  " shared)
        message(FATAL_ERROR "${object} defines symbols that other objects may use; "
            "put their code into an anonymous namespace:\n  ${shared}")
    endif()
endforeach()
