#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "parts/exp2_coefficients.h"
#include "parts/rows.h"

namespace specens {
namespace {

inline float half_to_float(uint16_t half) {
    const uint32_t sign = uint32_t{half} >> 15 << 31;
    const uint32_t exponent = half >> 10 & 0x1F;
    const uint32_t fraction = half & 0x3FF;
    if (exponent == 0x1F) {
        return std::bit_cast<float>(sign | 0x7F800000 | fraction << 13);
    }
    if (exponent == 0) {
        const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
        return sign != 0 ? -magnitude : magnitude;
    }
    return std::bit_cast<float>(sign | (exponent + 112) << 23 | fraction << 13);
}

struct Vector {
    float value[16];

    struct NanSeen {
        bool seen;
        void add(const Vector& x, const Vector& y) {
            for (int lane = 0; lane < 16; ++lane) {
                seen |= (x.value[lane] != x.value[lane]) | (y.value[lane] != y.value[lane]);
            }
        }
        bool any() const { return seen; }
    };
    struct SignSeen {
        bool seen;
        void add(const Vector& x) {
            for (float v : x.value) {
                seen |= std::signbit(v);
            }
        }
        bool any() const { return seen; }
    };

    template <typename Function>
    static Vector make(Function function) {
        Vector out;
        for (int lane = 0; lane < 16; ++lane) {
            out.value[lane] = function(lane);
        }
        return out;
    }
    static Vector load(const float* from) {
        return make([&](int lane) { return from[lane]; });
    }
    static Vector load_partial(const float* from, int64_t count, float fill) {
        return make([&](int lane) { return lane < count ? from[lane] : fill; });
    }
    static Vector set(float x) {
        return make([&](int) { return x; });
    }
    static Vector widen_bf16(const uint16_t* from) {
        return make([&](int lane) { return std::bit_cast<float>(uint32_t{from[lane]} << 16); });
    }
    static Vector widen_fp16(const uint16_t* from) {
        return make([&](int lane) { return half_to_float(from[lane]); });
    }
    void store(float* to) const { std::memcpy(to, value, sizeof(value)); }
    void store_partial(float* to, int64_t count) const {
        std::memcpy(to, value, std::min<int64_t>(count, 16) * sizeof(float));
    }

    Vector operator+(const Vector& y) const {
        return make([&](int lane) { return value[lane] + y.value[lane]; });
    }
    Vector operator-(const Vector& y) const {
        return make([&](int lane) { return value[lane] - y.value[lane]; });
    }
    Vector operator*(const Vector& y) const {
        return make([&](int lane) { return value[lane] * y.value[lane]; });
    }
    Vector fused(const Vector& factor, const Vector& term) const { return *this * factor + term; }
    Vector min(const Vector& y) const {
        return make([&](int lane) { return value[lane] < y.value[lane] ? value[lane] : y.value[lane]; });
    }
    Vector max(const Vector& y) const {
        return make([&](int lane) { return value[lane] > y.value[lane] ? value[lane] : y.value[lane]; });
    }
    Vector select_below(const Vector& x, const Vector& limit, const Vector& other) const {
        return make([&](int lane) { return x.value[lane] < limit.value[lane] ? other.value[lane] : value[lane]; });
    }
    Vector select_equal(const Vector& x, const Vector& y, const Vector& other) const {
        return make([&](int lane) { return x.value[lane] == y.value[lane] ? other.value[lane] : value[lane]; });
    }
    Vector select_unset(uint16_t bits, const Vector& other) const {
        return make([&](int lane) { return (bits >> lane & 1) != 0 ? value[lane] : other.value[lane]; });
    }
    Vector mantissa() const {
        return make([&](int lane) {
            return std::bit_cast<float>((std::bit_cast<uint32_t>(value[lane]) & 0x7FFFFF) | 127u << 23);
        });
    }
    Vector truncated() const {
        constexpr int32_t none = std::numeric_limits<int32_t>::min();
        return make([&](int lane) {
            const bool fits = std::abs(value[lane]) < 0x1p31f;
            return std::bit_cast<float>(fits ? static_cast<int32_t>(value[lane]) : none);
        });
    }
    Vector exponent() const {
        return make([&](int lane) {
            return static_cast<float>(static_cast<int32_t>(std::bit_cast<uint32_t>(value[lane]) >> 23) - 127);
        });
    }
    int64_t compress_at_least(const Vector& limit, float* to) const {
        int64_t found = 0;
        for (int lane = 0; lane < 16; ++lane) {
            to[found] = value[lane];
            found += value[lane] >= limit.value[lane] ? 1 : 0;
        }
        return found;
    }
    float sum() const {
        float parts[16];
        store(parts);
        for (int half = 8; half > 0; half /= 2) {
            for (int lane = 0; lane < half; ++lane) {
                parts[lane] += parts[lane + half];
            }
        }
        return parts[0];
    }
    float largest() const { return *std::max_element(value, value + 16); }
};

// 2^y = 2^part * 2^whole with |part| <= 1/2: a polynomial and an exponent, whose bits are 0 for -127.
struct Exp2 {
    double scale, offset;

    Exp2(float scale_of_one, float offset_of_one) : scale(scale_of_one), offset(offset_of_one) {}

    Vector operator()(const Vector& x) const {
        return Vector::make([&](int lane) {
            const auto exact = static_cast<float>(x.value[lane] * scale - offset);
            const float y = exact < -127.0f ? -127.0f : exact;
            constexpr float magic = 0x1.8p23f + 127;  // the sum's low bits are y + 127 rounded to an integer
            const float rounded = y + magic;
            const float part = y - (rounded - magic);
            float fraction = exp2_coefficients[5];
            for (int degree = 4; degree >= 0; --degree) {
                fraction = fraction * part + exp2_coefficients[degree];
            }
            return fraction * std::bit_cast<float>(std::bit_cast<uint32_t>(rounded) << 23);
        });
    }
    Vector add(const Vector& x, const Vector& total) const { return total + (*this)(x); }
};

#include "parts/rows.inc"

}  // namespace

const RowKernels& row_kernels_plain() { return kernels; }

}  // namespace specens
