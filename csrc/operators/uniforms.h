// The results of uniforms, for the CPU and for CUDA.
#pragma once

#include "operators/results.h"
#include "uniforms/uniforms.h"

namespace specens {

// The arguments, with the memory of the result.
inline UniformArguments add_uniforms(Results& results, const TorchTensor& seeds, const TorchTensor& positions,
                                     const TorchTensor& steps, int64_t stream) {
    const Tensor views[] = {view(seeds), view(positions), view(steps)};
    auto* out = results.add<double>({seeds.numel()}, ScalarType::Double, &seeds);
    const UniformArguments arguments = uniform_arguments(views[0], views[1], views[2], stream, out);
    results.finish(std::span<const Tensor>(views));
    return arguments;
}

}  // namespace specens
