// torch's tensors and threads as the core takes them.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <initializer_list>
#include <optional>
#include <vector>

#include "parts/parallel.h"
#include "parts/tensor.h"

namespace specens {

using torch::headeronly::ScalarType;
using TorchTensor = torch::stable::Tensor;

inline int32_t dtype_code(ScalarType dtype) {
    switch (dtype) {
        case ScalarType::Float:
            return SPECENS_FLOAT32;
        case ScalarType::Double:
            return SPECENS_FLOAT64;
        case ScalarType::Half:
            return SPECENS_FLOAT16;
        case ScalarType::BFloat16:
            return SPECENS_BFLOAT16;
        case ScalarType::Int:
            return SPECENS_INT32;
        case ScalarType::Long:
            return SPECENS_INT64;
        default:
            return -1;  // none that is calculated with
    }
}

// A view of a tensor, which lives longer.
inline Tensor view(const TorchTensor& tensor) {
    return {const_cast<void*>(tensor.const_data_ptr()), dtype_code(tensor.scalar_type()),
            static_cast<int32_t>(tensor.dim()), tensor.sizes().data(), tensor.strides().data()};
}

// The same of a tensor whose elements are only moved.
inline Tensor view_elements(const TorchTensor& tensor) {
    Tensor own = view(tensor);
    own.dtype = SPECENS_ELEMENT(static_cast<int32_t>(tensor.element_size()));
    own.data = tensor.mutable_data_ptr();
    return own;
}

// Views that lie still, of at most so many tensors.
class Views {
  public:
    explicit Views(size_t most) { views_.reserve(most); }
    const Tensor* add(const TorchTensor& tensor) { return &views_.emplace_back(view(tensor)); }
    const Tensor* add(const TorchTensor* tensor) { return tensor != nullptr ? add(*tensor) : nullptr; }
    const Tensor* add(const std::optional<TorchTensor>& tensor) { return tensor ? add(*tensor) : nullptr; }
    const Tensor* add(const std::vector<TorchTensor>& tensors) {
        const Tensor* first = views_.data() + views_.size();
        for (const TorchTensor& tensor : tensors) {
            add(tensor);
        }
        return first;
    }
    const std::vector<Tensor>& all() const { return views_; }

  private:
    std::vector<Tensor> views_;
};

// An uninitialised tensor on the CPU; cheaper than a call of aten::empty through the dispatcher.
inline TorchTensor new_tensor(std::initializer_list<int64_t> sizes, ScalarType dtype) {
    int64_t strides[4] = {};
    int64_t stride = 1;
    for (size_t dim = sizes.size(); dim-- > 0; stride *= sizes.begin()[dim]) {
        strides[dim] = stride;
    }
    const int32_t code = dtype == ScalarType::Long       ? aoti_torch_dtype_int64()
                         : dtype == ScalarType::Int      ? aoti_torch_dtype_int32()
                         : dtype == ScalarType::Byte     ? aoti_torch_dtype_uint8()
                         : dtype == ScalarType::Bool     ? aoti_torch_dtype_bool()
                         : dtype == ScalarType::Double   ? aoti_torch_dtype_float64()
                         : dtype == ScalarType::Half     ? aoti_torch_dtype_float16()
                         : dtype == ScalarType::BFloat16 ? aoti_torch_dtype_bfloat16()
                                                         : aoti_torch_dtype_float32();
    AtenTensorHandle handle = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.begin(), strides, code,
                                                    aoti_torch_device_type_cpu(), 0, &handle));
    return TorchTensor(handle);
}

// torch's pool, for as long as this object lives: what torch.set_num_threads says.
class TorchThreads {
  public:
    TorchThreads() : threads_{sizeof(specens_threads), torch::stable::get_num_threads(), &run, nullptr} {}

  private:
    static void run(void*, int64_t end, int64_t grain, specens_range range, void* of_range) {
        torch::stable::parallel_for(0, end, grain, [&](int64_t first, int64_t last) { range(of_range, first, last); });
    }

    specens_threads threads_;
    ThreadsOfCall of_call_{&threads_};
};

}  // namespace specens
