#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include "parts/neon.h"
#include "sample/noise.h"

namespace specens {
namespace {

struct Lanes {
    static constexpr int count = 16;
    uint32x4_t quarter[4];

    struct Product {
        uint64x2_t pair[8];
        uint32x4_t words(int index) const { return vreinterpretq_u32_u64(pair[index]); }
        Lanes low_half() const {
            return make([&](int index) { return vuzp1q_u32(words(2 * index), words(2 * index + 1)); });
        }
        Lanes high_half() const {
            return make([&](int index) { return vuzp2q_u32(words(2 * index), words(2 * index + 1)); });
        }
    };

    template <typename Function>
    static Lanes make(const Function& function) {
        return {{function(0), function(1), function(2), function(3)}};
    }
    static Lanes set(uint32_t word) {
        return make([=](int) { return vdupq_n_u32(word); });
    }
    static Lanes load(const uint32_t* from) {
        return make([=](int index) { return vld1q_u32(from + 4 * index); });
    }
    static Lanes count_from(uint32_t first) {
        const uint32_t first_four[4] = {0, 1, 2, 3};
        const uint32x4_t rising = vld1q_u32(first_four);
        return make([=](int index) { return vaddq_u32(vdupq_n_u32(first + 4 * index), rising); });
    }
    Product multiplied(uint32_t factor) const {
        Product product;
        for (int index = 0; index < 4; ++index) {
            product.pair[2 * index] = vmull_u32(vget_low_u32(quarter[index]), vdup_n_u32(factor));
            product.pair[2 * index + 1] = vmull_high_u32(quarter[index], vdupq_n_u32(factor));
        }
        return product;
    }
    Lanes combined(const Lanes& second, const Lanes& third) const {
        return make([&](int index) {
            return veorq_u32(veorq_u32(quarter[index], second.quarter[index]), third.quarter[index]);
        });
    }
    void store(uint32_t* to) const {
        for (int index = 0; index < 4; ++index) {
            vst1q_u32(to + 4 * index, quarter[index]);
        }
    }
};

inline uint64_t at_least_bits(const float* values, float limit) {
    const auto kept = [=](int q) { return vcgeq_f32(vld1q_f32(values + 4 * q), vdupq_n_f32(limit)); };
    return bits_of(kept(0), kept(1), kept(2), kept(3));
}

#include "sample/rows.inc"

}  // namespace

const ScoreKernels& score_kernels_neon() { return kernels; }

}  // namespace specens
