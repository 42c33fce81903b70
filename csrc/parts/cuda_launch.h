// What every CUDA operator needs: its device, the stream that torch uses now, and checked launches. A test has a file
// of this name that runs the same kernels on a CPU (tests/cuda_on_cpu).
#pragma once

#include <cuda_runtime.h>
#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>

#include <stdexcept>
#include <string>
#include <type_traits>

#define SPECENS_CUDA_OPERATORS(library) STABLE_TORCH_LIBRARY_IMPL(specens, CUDA, library)

namespace specens {

// Looked up at run time: a direct call would make this library need libtorch_cuda, which a CPU build of torch lacks.
inline cudaStream_t current_stream(int32_t device_index) {
    using Function = AOTITorchError (*)(int32_t, void**);
    static const auto function = [] {
        void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
        void* symbol = library == nullptr ? nullptr : dlsym(library, "aoti_torch_get_current_cuda_stream");
        return reinterpret_cast<Function>(symbol);
    }();
    if (function == nullptr) {
        throw std::runtime_error("libtorch_cuda.so is not loaded, so there is no CUDA stream to launch on");
    }
    void* stream = nullptr;
    if (function(device_index, &stream) != 0) {
        throw std::runtime_error("torch gave no CUDA stream for device " + std::to_string(device_index));
    }
    return static_cast<cudaStream_t>(stream);
}

// The device of a tensor, which is the current one for as long as this object lives.
class CudaDevice {
  public:
    explicit CudaDevice(const torch::stable::Tensor& tensor)
        : index_(tensor.get_device_index()), guard_(tensor.get_device_index()) {}

    template <typename... Parameters>
    void launch(const char* name, void (*kernel)(Parameters...), dim3 blocks, unsigned int threads,
                const std::type_identity_t<Parameters>&... arguments) const {
        kernel<<<blocks, threads, 0, current_stream(index_)>>>(arguments...);
        const cudaError_t error = cudaGetLastError();
        if (error != cudaSuccess) {
            throw std::runtime_error(std::string(name) + ": " + cudaGetErrorString(error));
        }
    }

  private:
    int32_t index_;
    torch::stable::accelerator::DeviceGuard guard_;
};

}  // namespace specens
