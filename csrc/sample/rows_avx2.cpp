#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include "sample/noise.h"

namespace specens {
namespace {

struct Lanes {
    static constexpr int count = 8;  // of 16, what is live would not fit into the registers
    __m256i half[2];

    template <typename Function>
    static Lanes make(Function function) {
        return {function(0), function(1)};
    }
    static Lanes set(uint32_t word) {
        return make([=](int) { return _mm256_set1_epi64x(word); });
    }
    static Lanes load(const uint32_t* from) {
        return make([=](int index) {
            return _mm256_cvtepu32_epi64(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 4 * index)));
        });
    }
    static Lanes count_from(uint32_t first) {
        const __m256i rising = _mm256_setr_epi64x(0, 1, 2, 3);
        return make([=](int index) { return _mm256_add_epi32(_mm256_set1_epi64x(first + 4 * index), rising); });
    }
    Lanes multiplied(uint32_t factor) const {
        return make([&](int index) { return _mm256_mul_epu32(half[index], _mm256_set1_epi64x(factor)); });
    }
    Lanes low_half() const { return *this; }
    Lanes high_half() const {
        return make([&](int index) { return _mm256_srli_epi64(half[index], 32); });
    }
    Lanes combined(const Lanes& second, const Lanes& third) const {
        return make([&](int index) {
            const __m256i two = _mm256_xor_si256(half[index], second.half[index]);
            return _mm256_xor_si256(two, third.half[index]);
        });
    }
    void store(uint32_t* to) const {
        for (int index = 0; index < 2; ++index) {
            const __m256i even = _mm256_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6);
            const __m256i words = _mm256_permutevar8x32_epi32(half[index], even);
            _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 4 * index), _mm256_castsi256_si128(words));
        }
    }
};

inline uint64_t at_least_bits(const float* values, float limit) {
    const auto eight = [limit](const float* from) {
        return _mm256_movemask_ps(_mm256_cmp_ps(_mm256_loadu_ps(from), _mm256_set1_ps(limit), _CMP_GE_OQ));
    };
    return static_cast<uint64_t>(eight(values)) | static_cast<uint64_t>(eight(values + 8)) << 8;
}

#include "sample/rows.inc"

}  // namespace

const ScoreKernels& score_kernels_avx2() { return kernels; }

}  // namespace specens
