// The arguments of operators, as plain views; `specens_kernels.arguments` says how they are packed.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cmath>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "parts/row_edits.h"
#include "parts/sources.h"

namespace specens {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline void require(bool holds, const char* message) {
    if (!holds) {
        throw std::invalid_argument(message);
    }
}

// An uninitialised tensor on the CPU; cheaper than a call of aten::empty through the dispatcher.
inline Tensor new_tensor(std::initializer_list<int64_t> sizes, ScalarType dtype) {
    int64_t strides[4] = {};
    int64_t stride = 1;
    for (size_t dim = sizes.size(); dim-- > 0; stride *= sizes.begin()[dim]) {
        strides[dim] = stride;
    }
    const int32_t code = dtype == ScalarType::Long  ? aoti_torch_dtype_int64()
                         : dtype == ScalarType::Int ? aoti_torch_dtype_int32()
                                                    : aoti_torch_dtype_float32();
    AtenTensorHandle handle = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.begin(), strides, code,
                                                    aoti_torch_device_type_cpu(), 0, &handle));
    return Tensor(handle);
}

// Takes arguments from an operator's lists in the order in which they were packed.
class ArgumentReader {
  public:
    ArgumentReader(const std::vector<Tensor>& tensors, const std::vector<int64_t>& integers,
                   const std::vector<double>& numbers)
        : tensors_(tensors), integers_(integers), numbers_(numbers), present_(integer()) {}
    // nullptr where the tensor is not given.
    const Tensor* tensor() {
        const bool present = (present_ & 1) != 0;
        present_ >>= 1;
        return present ? &tensors_.at(next_tensor_++) : nullptr;
    }
    int64_t integer() { return integers_.at(next_integer_++); }
    double number() { return numbers_.at(next_number_++); }
    std::vector<float> rest() const { return {numbers_.begin() + next_number_, numbers_.end()}; }

  private:
    const std::vector<Tensor>& tensors_;
    const std::vector<int64_t>& integers_;
    const std::vector<double>& numbers_;
    size_t next_tensor_ = 0, next_integer_ = 0, next_number_ = 0;
    int64_t present_;
};

// Logits [batch, steps, vocab], or [rows, vocab]: one step, or with `packed` rows of one request; the vocabulary is
// contiguous.
struct LogitView {
    const char* data;
    LogitType type;
    int64_t element_size, steps, stride_batch, stride_step, vocab;

    explicit LogitView(const Tensor& logits, bool packed = false) {
        require(logits.dim() == 2 || logits.dim() == 3, "logits must be [batch, vocab] or [batch, steps, vocab]");
        const int64_t last = logits.dim() - 1;
        require(logits.size(last) < 2 || logits.stride(last) == 1, "logits must have a contiguous vocabulary");
        const ScalarType dtype = logits.scalar_type();
        require(dtype == ScalarType::Float || dtype == ScalarType::BFloat16 || dtype == ScalarType::Half,
                "logits must be float32, bfloat16 or float16");
        type = dtype == ScalarType::Float      ? LogitType::float32
               : dtype == ScalarType::BFloat16 ? LogitType::bfloat16
                                               : LogitType::float16;
        element_size = type == LogitType::float32 ? 4 : 2;
        data = static_cast<const char*>(logits.const_data_ptr());
        stride_batch = packed ? 0 : logits.stride(0);
        steps = last == 2 ? logits.size(1) : packed ? logits.size(0) : 1;
        stride_step = last == 2 ? logits.stride(1) : packed ? logits.stride(0) : 0;
        vocab = logits.size(last);
    }
    LogitRow row(int64_t request, int64_t step) const {
        return {data + (request * stride_batch + step * stride_step) * element_size, type, vocab};
    }
};

inline const float* optional_float(const Tensor* tensor) {
    require(tensor == nullptr || (tensor->scalar_type() == ScalarType::Float && tensor->is_contiguous()),
            "per-request parameters, weights and biases must be contiguous float32");
    return tensor != nullptr ? tensor->const_data_ptr<float>() : nullptr;
}

// One number for all requests, or one a request.
struct RequestNumber {
    double number;
    const float* rows;  // [batch]

    explicit RequestNumber(ArgumentReader& reader) : number(reader.number()), rows(optional_float(reader.tensor())) {}
    bool always(double value) const { return rows == nullptr && number == value; }
    double operator()(int64_t request) const { return rows != nullptr ? double{rows[request]} : number; }
};

inline const int64_t* optional_int64(const Tensor* tensor) {
    require(tensor == nullptr || (tensor->scalar_type() == ScalarType::Long && tensor->is_contiguous()),
            "lengths, indices, seeds and positions must be contiguous int64");
    return tensor != nullptr ? tensor->const_data_ptr<int64_t>() : nullptr;
}

// Token ids [requests, width], or [width] for one request.
inline TokenTable optional_tokens(const Tensor* tensor) {
    if (tensor == nullptr) {
        return {};
    }
    const bool wide = tensor->scalar_type() == ScalarType::Long;
    require(wide || tensor->scalar_type() == ScalarType::Int, "tokens must be int64 or int32");
    const bool rows = tensor->dim() == 2;
    return {tensor->const_data_ptr(), wide, rows ? tensor->stride(0) : 0, tensor->stride(rows ? 1 : 0),
            tensor->size(rows ? 1 : 0)};
}

}  // namespace specens
