#include <immintrin.h>

#include <algorithm>
#include <cstring>
#include <limits>

#include "parts/exp2_coefficients.h"
#include "parts/rows.h"

namespace specens {
namespace {

struct Vector {
    __m256 low, high;

    struct NanSeen {
        __m256 mask;
        void add(Vector x, Vector y) {
            mask = _mm256_or_ps(mask, _mm256_or_ps(_mm256_cmp_ps(x.low, y.low, _CMP_UNORD_Q),
                                                   _mm256_cmp_ps(x.high, y.high, _CMP_UNORD_Q)));
        }
        bool any() const { return _mm256_movemask_ps(mask) != 0; }
    };
    struct SignSeen {
        __m256 bits;
        void add(Vector x) { bits = _mm256_or_ps(bits, _mm256_or_ps(x.low, x.high)); }
        bool any() const { return _mm256_movemask_ps(bits) != 0; }
    };

    static Vector load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
    static Vector load_partial(const float* from, int64_t count, float fill) {
        float padded[16];
        std::fill(padded, padded + 16, fill);
        std::memcpy(padded, from, std::min<int64_t>(count, 16) * sizeof(float));
        return load(padded);
    }
    static Vector set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
    static __m256 widen_eight_bf16(const uint16_t* from) {
        const __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
        return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
    }
    static Vector widen_bf16(const uint16_t* from) { return {widen_eight_bf16(from), widen_eight_bf16(from + 8)}; }
    static Vector widen_fp16(const uint16_t* from) {
        return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))),
                _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 8)))};
    }
    void store(float* to) const {
        _mm256_storeu_ps(to, low);
        _mm256_storeu_ps(to + 8, high);
    }
    void store_partial(float* to, int64_t count) const {
        float padded[16];
        store(padded);
        std::memcpy(to, padded, std::min<int64_t>(count, 16) * sizeof(float));
    }

    Vector operator+(Vector y) const { return {_mm256_add_ps(low, y.low), _mm256_add_ps(high, y.high)}; }
    Vector operator-(Vector y) const { return {_mm256_sub_ps(low, y.low), _mm256_sub_ps(high, y.high)}; }
    Vector operator*(Vector y) const { return {_mm256_mul_ps(low, y.low), _mm256_mul_ps(high, y.high)}; }
    Vector fused(Vector factor, Vector term) const {
        return {_mm256_fmadd_ps(low, factor.low, term.low), _mm256_fmadd_ps(high, factor.high, term.high)};
    }
    Vector min(Vector y) const { return {_mm256_min_ps(low, y.low), _mm256_min_ps(high, y.high)}; }
    Vector max(Vector y) const { return {_mm256_max_ps(low, y.low), _mm256_max_ps(high, y.high)}; }
    Vector select_below(Vector x, Vector limit, Vector other) const {
        return {_mm256_blendv_ps(low, other.low, _mm256_cmp_ps(x.low, limit.low, _CMP_LT_OQ)),
                _mm256_blendv_ps(high, other.high, _mm256_cmp_ps(x.high, limit.high, _CMP_LT_OQ))};
    }
    Vector select_equal(Vector x, Vector y, Vector other) const {
        return {_mm256_blendv_ps(low, other.low, _mm256_cmp_ps(x.low, y.low, _CMP_EQ_OQ)),
                _mm256_blendv_ps(high, other.high, _mm256_cmp_ps(x.high, y.high, _CMP_EQ_OQ))};
    }
    static __m256 blend_unset(__m256 value, uint16_t bits, __m256 other) {
        const __m256i each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
        const __m256i unset =
            _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(bits), each), _mm256_setzero_si256());
        return _mm256_blendv_ps(value, other, _mm256_castsi256_ps(unset));
    }
    Vector select_unset(uint16_t bits, Vector other) const {
        return {blend_unset(low, bits, other.low), blend_unset(high, bits >> 8, other.high)};
    }
    static __m256 mantissa_of(__m256 x) {
        const __m256i fraction = _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7FFFFF));
        return _mm256_castsi256_ps(_mm256_or_si256(fraction, _mm256_set1_epi32(127 << 23)));
    }
    static __m256 exponent_of(__m256 x) {
        const __m256i biased = _mm256_srli_epi32(_mm256_castps_si256(x), 23);
        return _mm256_cvtepi32_ps(_mm256_sub_epi32(biased, _mm256_set1_epi32(127)));
    }
    Vector mantissa() const { return {mantissa_of(low), mantissa_of(high)}; }
    Vector truncated() const {
        return {_mm256_castsi256_ps(_mm256_cvttps_epi32(low)), _mm256_castsi256_ps(_mm256_cvttps_epi32(high))};
    }
    Vector exponent() const { return {exponent_of(low), exponent_of(high)}; }
    int64_t compress_at_least(Vector limit, float* to) const {
        const int kept = _mm256_movemask_ps(_mm256_cmp_ps(low, limit.low, _CMP_GE_OQ)) |
                         _mm256_movemask_ps(_mm256_cmp_ps(high, limit.high, _CMP_GE_OQ)) << 8;
        if (kept == 0) {
            return 0;
        }
        float lanes[16];
        store(lanes);
        int64_t found = 0;
        for (int lane = 0; lane < 16; ++lane) {
            to[found] = lanes[lane];
            found += kept >> lane & 1;
        }
        return found;
    }
    float sum() const {
        const __m256 eight = _mm256_add_ps(low, high);
        const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
        const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
    }
    float largest() const {
        const __m256 eight = _mm256_max_ps(low, high);
        const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
        const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
        return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
    }
};

// 2^y = 2^part * 2^whole with |part| <= 1/2: a polynomial and an exponent, whose bits are 0 for -127.
struct Exp2 {
    __m256 scale, offset;

    Exp2(float scale_of_one, float offset_of_one)
        : scale(_mm256_set1_ps(scale_of_one)), offset(_mm256_set1_ps(offset_of_one)) {}

    __m256 eight(__m256 x) const {
        const __m256 y = _mm256_max_ps(_mm256_set1_ps(-127.0f), _mm256_fmsub_ps(x, scale, offset));
        const __m256 magic = _mm256_set1_ps(0x1.8p23f + 127);  // the sum's low bits are y + 127 rounded to an integer
        const __m256 rounded = _mm256_add_ps(y, magic);
        const __m256 part = _mm256_sub_ps(y, _mm256_sub_ps(rounded, magic));
        __m256 fraction = _mm256_set1_ps(exp2_coefficients[5]);
        for (int power = 4; power >= 0; --power) {
            fraction = _mm256_fmadd_ps(fraction, part, _mm256_set1_ps(exp2_coefficients[power]));
        }
        const __m256i exponent = _mm256_slli_epi32(_mm256_castps_si256(rounded), 23);
        return _mm256_mul_ps(fraction, _mm256_castsi256_ps(exponent));
    }
    Vector operator()(Vector x) const { return {eight(x.low), eight(x.high)}; }
    Vector add(Vector x, Vector total) const { return total + (*this)(x); }
};

#include "parts/rows.inc"

}  // namespace

const RowKernels& row_kernels_avx2() { return kernels; }

}  // namespace specens
