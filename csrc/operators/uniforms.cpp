#include "operators/tensors.h"
#include "uniforms/coins.h"

namespace specens {
namespace {

TorchTensor uniforms_cpu(const TorchTensor& seeds, const TorchTensor& positions, const TorchTensor& steps,
                         int64_t stream) {
    TorchTensor uniforms = new_tensor({seeds.numel()}, ScalarType::Double);
    auto* out = uniforms.mutable_data_ptr<double>();
    const CoinArguments arguments = coin_arguments(view(seeds), view(positions), view(steps), stream, out);
    const TorchThreads threads;
    write_coins(arguments, seeds.numel());
    return uniforms;
}

}  // namespace
}  // namespace specens

STABLE_TORCH_LIBRARY_FRAGMENT(specens, library) {
    library.def("uniforms(Tensor seeds, Tensor positions, Tensor step, int stream) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(specens, CPU, library) { library.impl("uniforms", TORCH_BOX(&specens::uniforms_cpu)); }
