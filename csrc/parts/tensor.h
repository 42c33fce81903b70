// Tensors of callers, checked where they are first looked at.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "include/specens.h"
#include "parts/require.h"

namespace specens {

using Tensor = specens_tensor;

constexpr int64_t any_size = -1;

inline int64_t size(const Tensor& tensor, int64_t dim) { return tensor.sizes[dim]; }

inline int64_t stride(const Tensor& tensor, int64_t dim) {
    if (tensor.strides != nullptr) {
        return tensor.strides[dim];
    }
    int64_t product = 1;
    for (int64_t inner = dim + 1; inner < tensor.ndim; ++inner) {
        product *= tensor.sizes[inner];
    }
    return product;
}

inline int64_t count_elements(const Tensor& tensor) {
    int64_t product = 1;
    for (int64_t dim = 0; dim < tensor.ndim; ++dim) {
        product *= tensor.sizes[dim];
    }
    return product;
}

inline int64_t element_size(const Tensor& tensor) {
    switch (tensor.dtype) {
        case SPECENS_FLOAT32:
        case SPECENS_INT32:
            return 4;
        case SPECENS_FLOAT64:
        case SPECENS_INT64:
            return 8;
        case SPECENS_FLOAT16:
        case SPECENS_BFLOAT16:
            return 2;
        case SPECENS_UINT8:
            return 1;
        default:
            return tensor.dtype - SPECENS_ELEMENT(0);
    }
}

inline bool is_contiguous(const Tensor& tensor) {
    int64_t expected = 1;
    for (int64_t dim = tensor.ndim; tensor.strides != nullptr && dim-- > 0;) {
        if (tensor.sizes[dim] != 1 && tensor.strides[dim] != expected) {
            return count_elements(tensor) == 0;
        }
        expected *= tensor.sizes[dim];
    }
    return true;
}

// Whether the elements of the last dimension lie together.
inline bool has_contiguous_rows(const Tensor& tensor) {
    const int64_t last = tensor.ndim - 1;
    return size(tensor, last) == 1 || stride(tensor, last) == 1 || count_elements(tensor) == 0;
}

template <typename Element>
const Element* data_of(const Tensor& tensor) {
    return static_cast<const Element*>(tensor.data);
}

inline std::string shape_text(const int64_t* sizes, int64_t count) {
    std::string text = "[";
    for (int64_t dim = 0; dim < count; ++dim) {
        text += (dim > 0 ? ", " : "") + (sizes[dim] == any_size ? std::string("*") : std::to_string(sizes[dim]));
    }
    return text + "]";
}

inline std::string shape_text(const Tensor& tensor) { return shape_text(tensor.sizes, tensor.ndim); }

// Throws unless the shape is the one expected, where any_size is any.
inline void require_shape(const char* name, const Tensor& tensor, std::initializer_list<int64_t> sizes) {
    const auto same = [](int64_t wanted, int64_t own) { return wanted == any_size || wanted == own; };
    if (tensor.ndim != static_cast<int64_t>(sizes.size()) ||
        !std::equal(sizes.begin(), sizes.end(), tensor.sizes, same)) {
        fail(name, "shape " + shape_text(sizes.begin(), static_cast<int64_t>(sizes.size())), shape_text(tensor));
    }
}

inline void require_dtype(const char* name, const Tensor& tensor, std::initializer_list<int32_t> dtypes,
                          const char* expected) {
    if (std::find(dtypes.begin(), dtypes.end(), tensor.dtype) == dtypes.end()) {
        fail(name, expected, "the dtype with the code " + std::to_string(tensor.dtype));
    }
}

}  // namespace specens
