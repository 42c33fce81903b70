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

#define SPECENS_UNIFORMS_ARGUMENTS "Tensor seeds, Tensor positions, Tensor step, int stream"

STABLE_TORCH_LIBRARY_FRAGMENT(specens, library) {
    library.def("uniforms(" SPECENS_UNIFORMS_ARGUMENTS ") -> Tensor");
    library.def("uniforms_out(Tensor(a!)[] out, " SPECENS_UNIFORMS_ARGUMENTS ") -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(specens, CPU, library) {
    using Kernels = specens::Operator<&specens::uniforms_cpu>;
    library.impl("uniforms", TORCH_BOX(&Kernels::make_one));
    library.impl("uniforms_out", TORCH_BOX(&Kernels::write));
}
