#pragma GCC diagnostic ignored "-Wuninitialized"  // of GCC 12's own avx512fintrin.h
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include "sample/noise.h"

namespace specens {
namespace {

struct Lanes {
    static constexpr int count = 16;
    __m512i half[2];

    static Lanes set(uint32_t word) { return {_mm512_set1_epi64(word), _mm512_set1_epi64(word)}; }
    static Lanes load(const uint32_t* from) {
        return {_mm512_cvtepu32_epi64(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))),
                _mm512_cvtepu32_epi64(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 8)))};
    }
    static Lanes count_from(uint32_t first) {
        const __m512i low = _mm512_add_epi32(_mm512_set1_epi64(first), _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7));
        return {low, _mm512_add_epi32(low, _mm512_set1_epi64(8))};
    }
    Lanes multiplied(uint32_t factor) const {
        const __m512i all = _mm512_set1_epi64(factor);
        return {_mm512_mul_epu32(half[0], all), _mm512_mul_epu32(half[1], all)};
    }
    Lanes low_half() const { return *this; }
    Lanes high_half() const { return {_mm512_srli_epi64(half[0], 32), _mm512_srli_epi64(half[1], 32)}; }
    Lanes combined(Lanes second, Lanes third) const {
        constexpr int exclusive_or = 0x96;
        return {_mm512_ternarylogic_epi64(half[0], second.half[0], third.half[0], exclusive_or),
                _mm512_ternarylogic_epi64(half[1], second.half[1], third.half[1], exclusive_or)};
    }
    void store(uint32_t* to) const {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi64_epi32(half[0]));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 8), _mm512_cvtepi64_epi32(half[1]));
    }
};

inline uint64_t at_least_bits(const float* values, float limit) {
    return _mm512_cmp_ps_mask(_mm512_loadu_ps(values), _mm512_set1_ps(limit), _CMP_GE_OQ);
}

#include "sample/rows.inc"

}  // namespace

const ScoreKernels& score_kernels_avx512() { return kernels; }

}  // namespace specens
