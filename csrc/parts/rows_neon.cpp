#include <algorithm>
#include <cstring>
#include <limits>

#include "parts/exp2_coefficients.h"
#include "parts/neon.h"
#include "parts/rows.h"

namespace specens {
namespace {

struct Vector {
    float32x4_t quarter[4];

    struct NanSeen {
        float32x4_t largest[4];  // an instruction whose result is NaN where an operand is
        void add(const Vector& x, const Vector& y) {
            for (int q = 0; q < 4; ++q) {
                largest[q] = vmaxq_f32(largest[q], vmaxq_f32(x.quarter[q], y.quarter[q]));
            }
        }
        bool any() const {
            const float32x4_t all = vmaxq_f32(vmaxq_f32(largest[0], largest[1]), vmaxq_f32(largest[2], largest[3]));
            return vminvq_u32(vceqq_f32(all, all)) == 0;
        }
    };
    struct SignSeen {
        uint32x4_t bits;
        void add(const Vector& x) {
            for (float32x4_t own : x.quarter) {
                bits = vorrq_u32(bits, vreinterpretq_u32_f32(own));
            }
        }
        bool any() const { return vmaxvq_u32(bits) >> 31 != 0; }
    };

    template <typename Function>
    static Vector make(const Function& function) {
        return {{function(0), function(1), function(2), function(3)}};
    }
    static Vector load(const float* from) {
        return make([=](int q) { return vld1q_f32(from + 4 * q); });
    }
    static Vector load_partial(const float* from, int64_t count, float fill) {
        float padded[16];
        std::fill(padded, padded + 16, fill);
        std::memcpy(padded, from, std::min<int64_t>(count, 16) * sizeof(float));
        return load(padded);
    }
    static Vector set(float x) {
        return make([=](int) { return vdupq_n_f32(x); });
    }
    static Vector widen_bf16(const uint16_t* from) {
        return make([=](int q) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(from + 4 * q), 16)); });
    }
    static Vector widen_fp16(const uint16_t* from) {
        return make([=](int q) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from + 4 * q))); });
    }
    void store(float* to) const {
        for (int q = 0; q < 4; ++q) {
            vst1q_f32(to + 4 * q, quarter[q]);
        }
    }
    void store_partial(float* to, int64_t count) const {
        float padded[16];
        store(padded);
        std::memcpy(to, padded, std::min<int64_t>(count, 16) * sizeof(float));
    }

    Vector operator+(const Vector& y) const {
        return make([&](int q) { return vaddq_f32(quarter[q], y.quarter[q]); });
    }
    Vector operator-(const Vector& y) const {
        return make([&](int q) { return vsubq_f32(quarter[q], y.quarter[q]); });
    }
    Vector operator*(const Vector& y) const {
        return make([&](int q) { return vmulq_f32(quarter[q], y.quarter[q]); });
    }
    Vector fused(const Vector& factor, const Vector& term) const {
        return make([&](int q) { return vfmaq_f32(term.quarter[q], quarter[q], factor.quarter[q]); });
    }
    // Not fmin and fmax, whose result is NaN where an operand is, nor fminnm and fmaxnm, where it is a signaling one.
    Vector min(const Vector& y) const { return y.select_below(*this, y, *this); }
    Vector max(const Vector& y) const { return y.select_below(y, *this, *this); }
    Vector select_below(const Vector& x, const Vector& limit, const Vector& other) const {
        return make(
            [&](int q) { return vbslq_f32(vcltq_f32(x.quarter[q], limit.quarter[q]), other.quarter[q], quarter[q]); });
    }
    Vector select_equal(const Vector& x, const Vector& y, const Vector& other) const {
        return make(
            [&](int q) { return vbslq_f32(vceqq_f32(x.quarter[q], y.quarter[q]), other.quarter[q], quarter[q]); });
    }
    Vector select_unset(uint16_t bits, const Vector& other) const {
        const uint32_t first_four[4] = {1, 2, 4, 8};
        const uint32x4_t each = vld1q_u32(first_four);
        return make([&](int q) {
            return vbslq_f32(vtstq_u32(vdupq_n_u32(bits >> 4 * q), each), quarter[q], other.quarter[q]);
        });
    }
    Vector mantissa() const {
        return make([&](int q) { return vbslq_f32(vdupq_n_u32(0x7FFFFF), quarter[q], vdupq_n_f32(1.0f)); });
    }
    Vector exponent() const {
        return make([&](int q) {
            const uint32x4_t biased = vshrq_n_u32(vreinterpretq_u32_f32(quarter[q]), 23);
            return vcvtq_f32_s32(vsubq_s32(vreinterpretq_s32_u32(biased), vdupq_n_s32(127)));
        });
    }
    Vector truncated() const {
        const int32x4_t none = vdupq_n_s32(std::numeric_limits<int32_t>::min());
        return make([&](int q) {
            const uint32x4_t fits = vcltq_f32(quarter[q], vdupq_n_f32(0x1p31f));
            return vreinterpretq_f32_s32(vbslq_s32(fits, vcvtq_s32_f32(quarter[q]), none));
        });
    }
    int64_t compress_at_least(const Vector& limit, float* to) const {
        const auto kept = [&](int q) { return vcgeq_f32(quarter[q], limit.quarter[q]); };
        float values[16];
        store(values);
        int64_t found = 0;
        for (uint32_t bits = bits_of(kept(0), kept(1), kept(2), kept(3)); bits != 0; bits &= bits - 1) {
            to[found++] = values[__builtin_ctz(bits)];
        }
        return found;
    }
    float sum() const {
        const float32x4_t four = vaddq_f32(vaddq_f32(quarter[0], quarter[2]), vaddq_f32(quarter[1], quarter[3]));
        const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
        return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
    }
    float largest() const {
        return vmaxvq_f32(vmaxq_f32(vmaxq_f32(quarter[0], quarter[1]), vmaxq_f32(quarter[2], quarter[3])));
    }
};

// 2^y = 2^part * 2^whole with |part| <= 1/2: a polynomial and an exponent, whose bits are 0 for -127.
struct Exp2 {
    float32x4_t scale, minus_offset;

    Exp2(float scale_of_one, float offset_of_one)
        : scale(vdupq_n_f32(scale_of_one)), minus_offset(vdupq_n_f32(-offset_of_one)) {}

    float32x4_t four(float32x4_t x) const {
        const float32x4_t y = vmaxq_f32(vfmaq_f32(minus_offset, x, scale), vdupq_n_f32(-127.0f));
        const float32x4_t magic = vdupq_n_f32(0x1.8p23f + 127);  // the sum's low bits are y + 127 rounded to an integer
        const float32x4_t rounded = vaddq_f32(y, magic);
        const float32x4_t part = vsubq_f32(y, vsubq_f32(rounded, magic));
        float32x4_t fraction = vdupq_n_f32(exp2_coefficients[5]);
        for (int power = 4; power >= 0; --power) {
            fraction = vfmaq_f32(vdupq_n_f32(exp2_coefficients[power]), fraction, part);
        }
        const uint32x4_t exponent = vshlq_n_u32(vreinterpretq_u32_f32(rounded), 23);
        return vmulq_f32(fraction, vreinterpretq_f32_u32(exponent));
    }
    Vector operator()(const Vector& x) const {
        return Vector::make([&](int q) { return four(x.quarter[q]); });
    }
    Vector add(const Vector& x, const Vector& total) const { return total + (*this)(x); }
};

#include "parts/rows.inc"

}  // namespace

const RowKernels& row_kernels_neon() { return kernels; }

}  // namespace specens
