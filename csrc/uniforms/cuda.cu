#include "operators/tensors.h"
#include "parts/cuda_launch.h"
#include "uniforms/coins.h"

namespace specens {
namespace {

constexpr int64_t threads_per_block = 256;

__global__ void uniforms_kernel(CoinArguments arguments, int64_t batch) {
    const int64_t request = int64_t{blockIdx.x} * threads_per_block + threadIdx.x;
    if (request < batch) {
        write_coin(arguments, request);
    }
}

TorchTensor uniforms_cuda(const TorchTensor& seeds, const TorchTensor& positions, const TorchTensor& steps,
                          int64_t stream) {
    const CudaDevice device(seeds);
    const int64_t batch = seeds.numel();
    TorchTensor uniforms = torch::stable::new_empty(seeds, {batch}, ScalarType::Double);
    auto* out = uniforms.mutable_data_ptr<double>();
    const CoinArguments arguments = coin_arguments(view(seeds), view(positions), view(steps), stream, out);
    if (batch > 0) {
        const auto blocks = static_cast<unsigned int>((batch + threads_per_block - 1) / threads_per_block);
        device.launch("uniforms", uniforms_kernel, blocks, threads_per_block, arguments, batch);
    }
    return uniforms;
}

}  // namespace
}  // namespace specens

SPECENS_CUDA_OPERATORS(library) { library.impl("uniforms", TORCH_BOX(&specens::uniforms_cuda)); }
