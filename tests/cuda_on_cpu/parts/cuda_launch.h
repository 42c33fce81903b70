// Stands in for csrc/parts/cuda_launch.h: the CUDA operators as operators on CPU tensors, in a namespace of their own.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/stable/tensor.h>

#include <type_traits>

#define SPECENS_CUDA_OPERATORS(library) STABLE_TORCH_LIBRARY_IMPL(specens_cuda_on_cpu, CPU, library)

namespace specens {

struct CudaDevice {
    explicit CudaDevice(const torch::stable::Tensor&) {}

    template <typename... Parameters>
    void launch(const char*, void (*kernel)(Parameters...), dim3 blocks, unsigned int threads,
                const std::type_identity_t<Parameters>&... arguments) const {
        cuda_on_cpu::run_grid(blocks, threads, [&] { kernel(arguments...); });
    }
};

}  // namespace specens
