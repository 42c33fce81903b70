// Arithmetic on tiles: runs of at most `tile_size` neighbouring tokens of one row, small enough for the first cache.
// One table of functions for each instruction set.
#pragma once

#include <algorithm>
#include <cstdint>

namespace specens {

constexpr int64_t tile_size = 2048;

inline int64_t tile_count(int64_t vocab) { return (vocab + tile_size - 1) / tile_size; }

constexpr int64_t group_size = 128;  // neighbours whose largest number is kept for a search
constexpr int64_t groups_per_tile = tile_size / group_size;

// Powers below 2^smallest_exponent are lost in a sum with 1.
constexpr float smallest_exponent = -124;
constexpr float largest_exponent = 100;

constexpr double rough_excess = 1.0615;  // the largest (1 + x) / 2^x for x in [0, 1]
constexpr double rough_rounding = 1.0005;
constexpr float largest_rough_offset = 4096;

struct TileScan {
    float max;  // over numbers that are not NaN, -inf where there are none
    bool has_nan;
};

struct TileSum {
    float sum;  // NaN where a logit is
    float max;  // meaningless where a logit is NaN
};

// factor * 2^(x * scale - offset) where x >= threshold, else 0. A threshold of -inf costs nothing.
struct ScaledPowers {
    float scale, offset, threshold, factor;
};

enum class LogitType { float32, bfloat16, float16 };

// Logits where they lie.
struct TypedLogits {
    const void* data;
    LogitType type;
    TypedLogits(const void* logits, LogitType type_there) : data(logits), type(type_there) {}
    TypedLogits(const float* values) : TypedLogits(values, LogitType::float32) {}
};

// A function of logits, for each type.
template <typename Result, typename... Rest>
struct LogitFunction {
    Result (*of_type[3])(const void* logits, int64_t count, Rest... rest);
    Result operator()(TypedLogits logits, int64_t count, Rest... rest) const {
        return of_type[static_cast<int>(logits.type)](logits.data, count, rest...);
    }
};

struct RowKernels {
    // out[i] = float(in[i])
    void (*widen_bf16)(const uint16_t* in, int64_t count, float* out);
    void (*widen_fp16)(const uint16_t* in, int64_t count, float* out);
    LogitFunction<TileScan> scan;  // (values, count)
    // (values, count, group_max): as `scan`, and group_max[g] = the largest of the g-th `group_size` values.
    LogitFunction<TileScan, float*> scan_groups;
    // Copies values >= bound to `out` in order and returns their number; `out` has room for count + 16.
    int64_t (*gather)(const float* values, int64_t count, float bound, float* out);
    // out[i] = (logits[i] - shift) * factor, where NaN counts as -inf and +inf as the largest float
    void (*clean)(const float* logits, int64_t count, float shift, float factor, float* out);
    // (logits, count, scale, offset): sum_i 2^(logits[i] * scale - offset); exponents up to largest_exponent; those
    // below -126 may give 0, and that of a logit of -inf does
    LogitFunction<TileSum, float, float> exp2_sum;
    // The same in half the time: at most `rough_excess` times the sum and not below it, to `rough_rounding`; without
    // exponents below -127. NaN where a logit is NaN or an exponent above 127. |offset| < largest_rough_offset.
    LogitFunction<float, float, float> rough_exp2_sum;
    // out[i] += factor * 2^(logits[i] * scale - offset) where logits[i] >= threshold
    void (*exp2_add)(const float* logits, int64_t count, float scale, float offset, float threshold, float factor,
                     float* out);
    // out[i] = max(0, own powers of target[i] - other powers of draft[i]), if `out` is given; returns their sum
    float (*excess)(const float* target, const ScaledPowers& own, const float* draft, const ScaledPowers& other,
                    int64_t count, float* out);
    // out[i] += weight * logits[i], -inf where either is -inf, at most the largest float
    void (*weight_add)(const float* logits, int64_t count, float weight, float* out);
    // out[i] = replacement where values[i] < threshold
    void (*replace_below)(const float* values, int64_t count, float threshold, float replacement, float* out);
    // values[i] = other where bit i % 32 of words[i / 32] is 0
    void (*keep_bits)(const int32_t* words, int64_t count, float other, float* values);
    // sum_i masses[i] * log2(masses[i]), to 2e-6 of a mass; 0 for masses that are not normal numbers
    float (*log2_sum)(const float* masses, int64_t count);
    // masses[i] = max(masses[i], 0); returns their sum
    float (*clamp_sum)(float* masses, int64_t count);
};

// The index of the first of `values` that equals `value`, or count.
inline int64_t first_equal(const float* values, int64_t count, float value) {
    return std::find(values, values + count, value) - values;
}

const RowKernels& row_kernels();  // of the instruction set in use

const RowKernels& row_kernels_plain();
const RowKernels& row_kernels_avx2();
const RowKernels& row_kernels_avx512();
const RowKernels& row_kernels_neon();

}  // namespace specens
