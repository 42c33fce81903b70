#pragma GCC diagnostic ignored "-Wuninitialized"  // of GCC 12's own avx512fintrin.h
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include <algorithm>
#include <cstring>
#include <limits>

#include "parts/exp2_coefficients.h"
#include "parts/rows.h"

namespace specens {
namespace {

struct Vector {
    __m512 value;

    struct NanSeen {
        __mmask16 ordered = 0xFFFF;
        void add(Vector x, Vector y) { ordered = _mm512_mask_cmp_ps_mask(ordered, x.value, y.value, _CMP_ORD_Q); }
        bool any() const { return ordered != 0xFFFF; }
    };
    struct SignSeen {
        __m512i bits;
        void add(Vector x) { bits = _mm512_or_si512(bits, _mm512_castps_si512(x.value)); }
        bool any() const { return _mm512_movepi32_mask(bits) != 0; }
    };

    static __mmask16 first(int64_t count) { return count >= 16 ? 0xFFFF : (1u << count) - 1; }
    static Vector load(const float* from) { return {_mm512_loadu_ps(from)}; }
    static Vector load_partial(const float* from, int64_t count, float fill) {
        return {_mm512_mask_loadu_ps(_mm512_set1_ps(fill), first(count), from)};
    }
    static Vector set(float x) { return {_mm512_set1_ps(x)}; }
    static Vector widen_bf16(const uint16_t* from) {
        const __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
        return {_mm512_castsi512_ps(_mm512_slli_epi32(bits, 16))};
    }
    static Vector widen_fp16(const uint16_t* from) {
        return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))};
    }
    void store(float* to) const { _mm512_storeu_ps(to, value); }
    void store_partial(float* to, int64_t count) const { _mm512_mask_storeu_ps(to, first(count), value); }

    Vector operator+(Vector other) const { return {_mm512_add_ps(value, other.value)}; }
    Vector operator-(Vector other) const { return {_mm512_sub_ps(value, other.value)}; }
    Vector operator*(Vector other) const { return {_mm512_mul_ps(value, other.value)}; }
    Vector fused(Vector factor, Vector term) const { return {_mm512_fmadd_ps(value, factor.value, term.value)}; }
    Vector min(Vector other) const { return {_mm512_min_ps(value, other.value)}; }
    Vector max(Vector other) const { return {_mm512_max_ps(value, other.value)}; }
    Vector select_below(Vector x, Vector limit, Vector other) const {
        return {_mm512_mask_mov_ps(value, _mm512_cmp_ps_mask(x.value, limit.value, _CMP_LT_OQ), other.value)};
    }
    Vector select_equal(Vector x, Vector y, Vector other) const {
        return {_mm512_mask_mov_ps(value, _mm512_cmp_ps_mask(x.value, y.value, _CMP_EQ_OQ), other.value)};
    }
    Vector select_unset(uint16_t bits, Vector other) const { return {_mm512_mask_mov_ps(other.value, bits, value)}; }
    Vector mantissa() const { return {_mm512_getmant_ps(value, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_zero)}; }
    Vector truncated() const { return {_mm512_castsi512_ps(_mm512_cvttps_epi32(value))}; }
    Vector exponent() const { return {_mm512_getexp_ps(value)}; }
    int64_t compress_at_least(Vector limit, float* to) const {
        const __mmask16 kept = _mm512_cmp_ps_mask(value, limit.value, _CMP_GE_OQ);
        _mm512_storeu_ps(to, _mm512_maskz_compress_ps(kept, value));
        return __builtin_popcount(kept);
    }
    float sum() const {
        const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(value), _mm512_extractf32x8_ps(value, 1));
        const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
        const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
    }
    float largest() const { return _mm512_reduce_max_ps(value); }
};

// 2^y = 2^floor(y) * 2^(i / 32) * 2^part with part in [0, 1/32): a scale, a table and a polynomial. Fewer operations
// than a polynomial alone takes, whose number is what a pass over a row waits for.
struct Exp2 {
    __m512 scale, offset;
    __m512 low_table = _mm512_loadu_ps(exp2_table), high_table = _mm512_loadu_ps(exp2_table + 16);

    Exp2(float scale_of_one, float offset_of_one)
        : scale(_mm512_set1_ps(scale_of_one)), offset(_mm512_set1_ps(offset_of_one)) {}

    // total + 2^y
    Vector add(Vector x, Vector total) const {
        constexpr int down = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
        const __m512 y = _mm512_fmsub_ps(x.value, scale, offset);
        // the sum's low bits are y rounded down to 1/32, of which the table takes the lowest five
        const __m512i index = _mm512_castps_si512(_mm512_add_round_ps(y, _mm512_set1_ps(0x1.8p18f), down));
        const __m512 step = _mm512_scalef_ps(_mm512_permutex2var_ps(low_table, index, high_table), y);
        const __m512 part = _mm512_reduce_ps(y, 5 << 4 | down);
        __m512 rest = _mm512_set1_ps(exp2_table_coefficients[2]);
        rest = _mm512_fmadd_ps(rest, part, _mm512_set1_ps(exp2_table_coefficients[1]));
        rest = _mm512_fmadd_ps(rest, part, _mm512_set1_ps(exp2_table_coefficients[0]));
        return {_mm512_fmadd_ps(step, rest, total.value)};
    }
    Vector operator()(Vector x) const { return add(x, Vector::set(0.0f)); }
};

#include "parts/rows.inc"

}  // namespace

const RowKernels& row_kernels_avx512() { return kernels; }

}  // namespace specens
