// Integers of callers, int64 or int32, for the CPU and for CUDA.
#pragma once

#include "parts/philox.h"
#include "parts/tensor.h"

namespace specens {

// [rows, columns], of any strides; or [columns], of which every row is the same. Empty where there is no tensor.
struct IntegerTable {
    const void* data = nullptr;
    bool given = false, wide = true;
    int64_t stride_row = 0, stride_column = 0, columns = 0;

    IntegerTable() = default;
    IntegerTable(const char* name, const Tensor* tensor, std::initializer_list<int64_t> sizes) {
        if (tensor == nullptr) {
            return;
        }
        require_dtype(name, *tensor, {SPECENS_INT64, SPECENS_INT32}, "int64 or int32");
        require_shape(name, *tensor, sizes);
        const int64_t last = tensor->ndim - 1;
        data = tensor->data;
        given = true;
        wide = tensor->dtype == SPECENS_INT64;
        columns = size(*tensor, last);
        stride_column = tensor->strides != nullptr ? tensor->strides[last] : 1;
        stride_row = last == 0 ? 0 : tensor->strides != nullptr ? tensor->strides[0] : columns;
    }
    SPECENS_HOST_DEVICE int64_t operator()(int64_t row, int64_t column) const {
        const int64_t at = row * stride_row + column * stride_column;
        return wide ? static_cast<const int64_t*>(data)[at] : static_cast<const int32_t*>(data)[at];
    }
};

// An integer a request, or none.
class IntegerRows {
  public:
    IntegerRows() = default;
    IntegerRows(const char* name, const Tensor* tensor, int64_t count) : table_(name, tensor, {count}) {}
    SPECENS_HOST_DEVICE bool given() const { return table_.given; }
    SPECENS_HOST_DEVICE int64_t operator()(int64_t index) const { return table_(0, index); }

  private:
    IntegerTable table_;
};

}  // namespace specens
