// The arguments of operations as plain views of the caller's memory, checked.
#pragma once

#include <cstring>

#include "parts/integers.h"
#include "parts/row_edits.h"
#include "parts/sources.h"
#include "parts/tensor.h"

namespace specens {

// A caller's struct as this version has it: fields that the caller does not know have their defaults.
template <typename Struct>
Struct adopted(const char* name, const Struct* given, const Struct& defaults) {
    Struct own = defaults;
    if (given != nullptr) {
        if (given->struct_size < sizeof(size_t) || given->struct_size > sizeof(Struct)) {
            fail(name, "a struct_size of at most " + std::to_string(sizeof(Struct)),
                 std::to_string(given->struct_size) + "; was it made by its *_init, of this version of specens.h?");
        }
        std::memcpy(&own, given, given->struct_size);
    }
    return own;
}

inline void check_logits(const char* name, const Tensor& logits) {
    if (logits.ndim != 2 && logits.ndim != 3) {
        fail(name, "[batch, vocab], [batch, steps, vocab] or packed [rows, vocab]", shape_text(logits));
    }
    require_dtype(name, logits, {SPECENS_FLOAT32, SPECENS_BFLOAT16, SPECENS_FLOAT16}, "float32, bfloat16 or float16");
    if (size(logits, logits.ndim - 1) <= 0 || !has_contiguous_rows(logits)) {
        fail(name, "a contiguous vocabulary of one token or more", shape_text(logits));
    }
}

// Logits [batch, steps, vocab], or [rows, vocab]: one step, or with `packed` rows of one request; they are checked.
struct LogitView {
    const char* data;
    LogitType type;
    int64_t element_size, steps, stride_batch, stride_step, vocab;

    explicit LogitView(const Tensor& logits, bool packed = false) {
        const int64_t last = logits.ndim - 1;
        type = logits.dtype == SPECENS_FLOAT32    ? LogitType::float32
               : logits.dtype == SPECENS_BFLOAT16 ? LogitType::bfloat16
                                                  : LogitType::float16;
        element_size = type == LogitType::float32 ? 4 : 2;
        data = data_of<char>(logits);
        stride_batch = packed ? 0 : stride(logits, 0);
        steps = last == 2 ? size(logits, 1) : packed ? size(logits, 0) : 1;
        stride_step = last == 2 ? stride(logits, 1) : packed ? stride(logits, 0) : 0;
        vocab = size(logits, last);
    }
    LogitRow row(int64_t request, int64_t step) const {
        return {data + (request * stride_batch + step * stride_step) * element_size, type, vocab};
    }
};

inline const float* optional_float(const char* name, const Tensor* tensor, int64_t rows, int64_t columns) {
    if (tensor == nullptr) {
        return nullptr;
    }
    require_shape(name, *tensor, {rows, columns});
    if (tensor->dtype != SPECENS_FLOAT32 || !is_contiguous(*tensor)) {
        fail(name, "contiguous float32", "another dtype or layout");
    }
    return data_of<float>(*tensor);
}

// One number for all requests, or one a request, of any floating-point type.
struct RequestNumber {
    RequestNumber(const char* name, double for_all, const Tensor* rows, int64_t batch)
        : number_(for_all), given_(rows != nullptr) {
        if (given_) {
            require_shape(name, *rows, {batch});
            require_dtype(name, *rows, {SPECENS_FLOAT32, SPECENS_FLOAT64, SPECENS_FLOAT16, SPECENS_BFLOAT16},
                          "floating-point numbers");
            dtype_ = rows->dtype;
            data_ = rows->data;
            stride_ = stride(*rows, 0);
        }
    }
    bool always(double value) const { return !given_ && number_ == value; }
    double operator()(int64_t request) const {
        if (!given_) {
            return number_;
        }
        const int64_t index = request * stride_;
        if (dtype_ == SPECENS_FLOAT32) {
            return static_cast<const float*>(data_)[index];
        }
        if (dtype_ == SPECENS_FLOAT64) {
            return static_cast<const double*>(data_)[index];
        }
        float value;
        const uint16_t* half = static_cast<const uint16_t*>(data_) + index;
        (dtype_ == SPECENS_FLOAT16 ? row_kernels().widen_fp16 : row_kernels().widen_bf16)(half, 1, &value);
        return value;
    }

  private:
    double number_;
    bool given_;
    int32_t dtype_ = SPECENS_FLOAT32;
    const void* data_ = nullptr;
    int64_t stride_ = 0;
};

}  // namespace specens
