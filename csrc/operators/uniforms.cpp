#include "operators/uniforms.h"

namespace specens {
namespace {

void uniforms_cpu(Results& results, const TorchTensor& seeds, const TorchTensor& positions, const TorchTensor& steps,
                  int64_t stream) {
    const UniformArguments arguments = add_uniforms(results, seeds, positions, steps, stream);
    const TorchThreads threads;
    write_uniforms(arguments, seeds.numel());
}

}  // namespace
}  // namespace specens

SPECENS_OPERATOR(uniforms, "Tensor seeds, Tensor positions, Tensor step, int stream", "Tensor", make_one)
