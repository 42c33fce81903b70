#pragma GCC diagnostic ignored "-Wuninitialized"  // of GCC 12's own avx512fintrin.h
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include <algorithm>
#include <cstring>
#include <limits>

#include "parts/rows.h"

namespace specens {
namespace {

struct Vector {
    __m512 value;

    struct NanSeen {
        __mmask16 mask;
        void add(Vector x) { mask |= _mm512_cmp_ps_mask(x.value, x.value, _CMP_UNORD_Q); }
        bool any() const { return mask != 0; }
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

struct Power {
    Vector fraction, whole;
};

// 2^y = 2^(part / 32) * 2^(remainder / 32) * 2^whole with |part| <= 1/2: a quadratic, a table of 32 and an exponent.
struct Exp2 {
    __m512 scale, offset;
    __m512i low_table, high_table;  // the bits of 2^(remainder / 32), less remainder << 18

    Exp2(float scale_of_one, float offset_of_one)
        : scale(_mm512_set1_ps(scale_of_one * 32)),
          offset(_mm512_set1_ps(offset_of_one * 32)),
          low_table(_mm512_load_si512(table)),
          high_table(_mm512_load_si512(table + 16)) {}

    Power operator()(Vector x) const {
        const __m512 y = _mm512_max_ps(_mm512_set1_ps(-126.0f * 32), _mm512_fmsub_ps(x.value, scale, offset));
        // the low bits of the sum are y rounded to an integer
        const __m512i bits = _mm512_castps_si512(_mm512_add_ps(y, _mm512_set1_ps(0x1.8p23f)));
        const __m512 part = _mm512_reduce_ps(y, 0);  // y less y rounded to an integer
        const __m512i root = _mm512_permutex2var_epi32(low_table, bits, high_table);
        const __m512i whole = _mm512_add_epi32(root, _mm512_slli_epi32(bits, 18));
        const __m512 slope = _mm512_fmadd_ps(part, _mm512_set1_ps(0x1.ebfbe00p-13f), _mm512_set1_ps(0x1.62e5840p-6f));
        return {{_mm512_fmadd_ps(part, slope, _mm512_set1_ps(1.0f))}, {_mm512_castsi512_ps(whole)}};
    }

    alignas(64) static const uint32_t table[32];
};

const uint32_t Exp2::table[32] = {
    0x3F800000, 0x3F7ECD87, 0x3F7DAAC3, 0x3F7C980F, 0x3F7B95C2, 0x3F7AA43A, 0x3F79C3D3, 0x3F78F4F0,
    0x3F7837F0, 0x3F778D3A, 0x3F76F532, 0x3F767043, 0x3F75FED7, 0x3F75A15B, 0x3F75583F, 0x3F7523F6,
    0x3F7504F3, 0x3F74FBAF, 0x3F7508A4, 0x3F752C4D, 0x3F75672A, 0x3F75B9BE, 0x3F76248C, 0x3F76A81E,
    0x3F7744FD, 0x3F77FBB8, 0x3F78CCDF, 0x3F79B907, 0x3F7AC0C7, 0x3F7BE4BA, 0x3F7D257D, 0x3F7E83B3,
};

#include "parts/rows.inc"

}  // namespace

const RowKernels& row_kernels_avx512() { return kernels; }

}  // namespace specens
