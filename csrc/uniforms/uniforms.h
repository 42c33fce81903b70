// One uniform for each request: the body that the CPU loop and the CUDA grid share.
#pragma once

#include "parts/integers.h"

namespace specens {

struct UniformArguments {
    IntegerRows seeds, positions, steps;  // [batch]
    int64_t stream;
    double* uniforms;  // [batch], written
};

SPECENS_HOST_DEVICE inline void write_uniform(const UniformArguments& arguments, int64_t request) {
    arguments.uniforms[request] = philox_uniform(arguments.seeds(request), arguments.positions(request),
                                                 arguments.steps(request), arguments.stream);
}

inline UniformArguments uniform_arguments(const Tensor& seeds, const Tensor& positions, const Tensor& steps,
                                          int64_t stream, double* uniforms) {
    const int64_t batch = count_elements(seeds);
    return {{"seeds", &seeds, batch}, {"positions", &positions, batch}, {"step", &steps, batch}, stream, uniforms};
}

// On the CPU; `uniforms` of the arguments has so many.
void write_uniforms(const UniformArguments& arguments, int64_t batch);

}  // namespace specens
