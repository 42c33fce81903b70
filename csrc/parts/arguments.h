// The arguments of operators, as plain views; `specens_kernels.arguments` says how they are packed.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <bit>
#include <cmath>
#include <optional>
#include <span>
#include <vector>

#include "parts/require.h"
#include "parts/row_edits.h"
#include "parts/sources.h"

namespace specens {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

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

// Takes arguments from an operator's lists in the order in which they were packed. Of a group that was left out no
// tensor is given, and its integers and numbers are the defaults.
class ArgumentReader {
  public:
    ArgumentReader(const std::vector<Tensor>& tensors, const std::vector<int64_t>& integers,
                   const std::optional<std::vector<double>>& numbers)
        : tensors_(tensors),
          integers_(integers),
          numbers_(numbers.has_value() ? std::span<const double>(*numbers) : std::span<const double>()),
          groups_(static_cast<uint64_t>(integers.at(0))),
          present_(static_cast<uint64_t>(integers.at(1))),
          optional_(static_cast<size_t>(std::popcount(present_))) {
        require(optional_ < tensors.size(), "members are needed");
    }
    // The members' logits, behind all other tensors.
    std::span<const Tensor> member_logits() const { return std::span(tensors_).subspan(optional_); }
    // Whether the next group was not left out.
    bool has_group() const { return (groups_ & 1) != 0; }
    // Goes on to the next group.
    ArgumentReader& group() {
        in_group_ = has_group();
        groups_ >>= 1;
        return *this;
    }
    // nullptr where the tensor is not given.
    const Tensor* tensor() {
        if (!in_group_) {
            return nullptr;
        }
        const bool present = (present_ & 1) != 0;
        present_ >>= 1;
        return present ? &tensors_[next_tensor_++] : nullptr;
    }
    int64_t integer(int64_t otherwise) { return in_group_ ? integers_.at(next_integer_++) : otherwise; }
    template <typename Code>
    Code code(Code otherwise) {
        return static_cast<Code>(integer(static_cast<int64_t>(otherwise)));
    }
    double number(double otherwise) { return in_group_ ? next_number() : otherwise; }
    // Behind all groups: the members' weights, and then what is left.
    double weight() { return next_number(); }
    std::vector<double> rest() const { return {numbers_.begin(), numbers_.end()}; }

  private:
    double next_number() {
        require(!numbers_.empty(), "numbers are missing");
        const double first = numbers_.front();
        numbers_ = numbers_.subspan(1);
        return first;
    }

    const std::vector<Tensor>& tensors_;
    const std::vector<int64_t>& integers_;
    std::span<const double> numbers_;
    uint64_t groups_, present_;  // a bit for each group, and for each tensor of those that are there
    size_t optional_;            // tensors before the members' logits
    bool in_group_ = false;
    size_t next_tensor_ = 0, next_integer_ = 2;
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
        require(logits.size(last) > 0, "logits must have a vocabulary");
        require(logits.size(last) == 1 || logits.stride(last) == 1 || logits.numel() == 0,
                "logits must have a contiguous vocabulary");
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

inline const float* optional_float(const Tensor* tensor, int64_t rows, int64_t columns) {
    if (tensor == nullptr) {
        return nullptr;
    }
    require(tensor->dim() == 2 && tensor->size(0) == rows && tensor->size(1) == columns,
            "weights or biases have another shape");
    require(tensor->scalar_type() == ScalarType::Float && tensor->is_contiguous(),
            "weights and biases must be contiguous float32");
    return tensor->const_data_ptr<float>();
}

// A number for each request, of any floating-point type, or none.
class NumberRows {
  public:
    NumberRows(const Tensor* tensor, int64_t batch) {
        if (tensor != nullptr) {
            require(tensor->dim() == 1 && tensor->size(0) == batch, "per-request parameters must be [batch]");
            type_ = tensor->scalar_type();
            require(type_ == ScalarType::Float || type_ == ScalarType::Double || type_ == ScalarType::Half ||
                        type_ == ScalarType::BFloat16,
                    "per-request parameters must be floating-point numbers");
            given_ = true;
            data_ = tensor->const_data_ptr();
            stride_ = tensor->stride(0);
        }
    }
    bool given() const { return given_; }
    double operator()(int64_t request) const {
        const int64_t index = request * stride_;
        if (type_ == ScalarType::Float) {
            return static_cast<const float*>(data_)[index];
        }
        if (type_ == ScalarType::Double) {
            return static_cast<const double*>(data_)[index];
        }
        float value;
        const uint16_t* half = static_cast<const uint16_t*>(data_) + index;
        (type_ == ScalarType::Half ? row_kernels().widen_fp16 : row_kernels().widen_bf16)(half, 1, &value);
        return value;
    }

  private:
    bool given_ = false;
    const void* data_ = nullptr;
    ScalarType type_ = ScalarType::Float;
    int64_t stride_ = 0;
};

// One number for all requests, or one a request.
struct RequestNumber {
    double number;
    NumberRows rows;

    RequestNumber(ArgumentReader& reader, int64_t batch, double otherwise)
        : number(reader.number(otherwise)), rows(reader.tensor(), batch) {}
    bool always(double value) const { return !rows.given() && number == value; }
    double operator()(int64_t request) const { return rows.given() ? rows(request) : number; }
};

// Integers [rows, width] (2 `dims`) or [width], int64 or int32, of any strides; empty where there is no tensor.
inline TokenTable optional_integers(const Tensor* tensor, int64_t dims, int64_t rows = 0) {
    if (tensor == nullptr) {
        return {};
    }
    const bool wide = tensor->scalar_type() == ScalarType::Long;
    require(wide || tensor->scalar_type() == ScalarType::Int, "tokens, lengths and indices must be int64 or int32");
    require(tensor->dim() == dims && (dims == 1 || tensor->size(0) == rows),
            "tokens, lengths or indices have another shape");
    return {tensor->const_data_ptr(), wide, dims == 2 ? tensor->stride(0) : 0, tensor->stride(dims - 1),
            tensor->size(dims - 1)};
}

// An integer a request, or none.
class IntegerRows {
  public:
    IntegerRows(const Tensor* tensor, int64_t count) : table(optional_integers(tensor, 1)), given_(tensor != nullptr) {
        require(tensor == nullptr || table.width == count, "lengths, indices, seeds or positions have another length");
    }
    bool given() const { return given_; }
    int64_t operator()(int64_t index) const { return table(0, index); }
    TokenTable table;

  private:
    bool given_;
};

}  // namespace specens
