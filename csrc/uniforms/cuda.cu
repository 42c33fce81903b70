#include "operators/uniforms.h"
#include "parts/cuda_launch.h"

namespace specens {
namespace {

constexpr int64_t threads_per_block = 256;

__global__ void uniforms_kernel(UniformArguments arguments, int64_t batch) {
    const int64_t request = int64_t{blockIdx.x} * threads_per_block + threadIdx.x;
    if (request < batch) {
        write_uniform(arguments, request);
    }
}

void uniforms_cuda(Results& results, const TorchTensor& seeds, const TorchTensor& positions, const TorchTensor& steps,
                   int64_t stream) {
    const CudaDevice device(seeds);
    const int64_t batch = seeds.numel();
    const UniformArguments arguments = add_uniforms(results, seeds, positions, steps, stream);
    if (batch > 0) {
        const auto blocks = static_cast<unsigned int>((batch + threads_per_block - 1) / threads_per_block);
        device.launch("uniforms", uniforms_kernel, blocks, threads_per_block, arguments, batch);
    }
}

}  // namespace
}  // namespace specens

SPECENS_CUDA_OPERATORS(library) {
    using Kernels = specens::Operator<&specens::uniforms_cuda>;
    library.impl("uniforms", TORCH_BOX(&Kernels::make_one));
    library.impl("uniforms_out", TORCH_BOX(&Kernels::write));
}
