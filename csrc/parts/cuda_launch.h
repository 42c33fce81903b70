// What every CUDA launcher needs: the stream that torch uses now, and a check of the launch.
#pragma once

#include <cuda_runtime.h>
#include <dlfcn.h>
#include <torch/csrc/stable/tensor.h>

#include <stdexcept>
#include <string>

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

inline void check_launch(const char* kernel) {
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) {
        throw std::runtime_error(std::string(kernel) + ": " + cudaGetErrorString(error));
    }
}

}  // namespace specens
