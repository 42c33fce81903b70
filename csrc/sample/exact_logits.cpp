#include "sample/exact_logits.h"

#include <algorithm>
#include <cmath>

namespace specens {

const void* ExactLogits::address(int64_t token) const {
    const int64_t element_size = row_.type == LogitType::float32 ? sizeof(float) : sizeof(uint16_t);
    return static_cast<const char*>(row_.data) + token * element_size;
}

TypedLogits ExactLogits::tile(int64_t tile, float* scratch) const {
    const int64_t first = tile * tile_size;
    if (!edited(tile)) {
        return {address(first), row_.type};
    }
    return run(first, std::min(tile_size, vocab() - first), scratch);
}

const float* ExactLogits::run(int64_t first, int64_t count, float* scratch) const {
    const bool changed = edited(first / tile_size);
    if (row_.type == LogitType::float32) {
        const auto* logits = static_cast<const float*>(address(first));
        if (!changed) {
            return logits;
        }
        std::copy_n(logits, count, scratch);
    } else {
        const RowKernels& kernels = row_kernels();
        const auto widen = row_.type == LogitType::bfloat16 ? kernels.widen_bf16 : kernels.widen_fp16;
        widen(static_cast<const uint16_t*>(address(first)), count, scratch);
    }
    if (changed) {
        row_.edits->apply_run(first, count, scratch, true);
    }
    return scratch;
}

double ExactLogits::logit(int64_t token) const {
    float raw;
    if (row_.type == LogitType::float32) {
        raw = *static_cast<const float*>(address(token));
    } else {
        const RowKernels& kernels = row_kernels();
        const auto widen = row_.type == LogitType::bfloat16 ? kernels.widen_bf16 : kernels.widen_fp16;
        widen(static_cast<const uint16_t*>(address(token)), 1, &raw);
    }
    const double logit = row_.edits != nullptr ? row_.edits->apply(token, raw) : double{raw};
    constexpr double infinity = std::numeric_limits<double>::infinity();
    return std::isnan(logit) ? -infinity : logit == infinity ? double{std::numeric_limits<float>::max()} : logit;
}

}  // namespace specens
