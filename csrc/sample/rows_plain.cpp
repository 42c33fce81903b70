#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include "sample/noise.h"

namespace specens {
namespace {

struct Lanes {
    static constexpr int count = 16;
    uint64_t lane[count];

    template <typename Function>
    static Lanes make(Function function) {
        Lanes out;
        for (int index = 0; index < 16; ++index) {
            out.lane[index] = function(index);
        }
        return out;
    }
    static Lanes set(uint32_t word) {
        return make([=](int) { return word; });
    }
    static Lanes load(const uint32_t* from) {
        return make([=](int index) { return from[index]; });
    }
    static Lanes count_from(uint32_t first) {
        return make([=](int index) { return first + static_cast<uint32_t>(index); });
    }
    Lanes multiplied(uint32_t factor) const {
        return make([&](int index) { return (lane[index] & 0xFFFFFFFF) * factor; });
    }
    Lanes low_half() const { return *this; }
    Lanes high_half() const {
        return make([&](int index) { return lane[index] >> 32; });
    }
    Lanes combined(const Lanes& second, const Lanes& third) const {
        return make([&](int index) { return lane[index] ^ second.lane[index] ^ third.lane[index]; });
    }
    void store(uint32_t* to) const { std::copy_n(lane, 16, to); }
};

inline uint64_t at_least_bits(const float* values, float limit) {
    uint64_t bits = 0;
    for (int lane = 0; lane < 16; ++lane) {
        bits |= uint64_t{values[lane] >= limit} << lane;
    }
    return bits;
}

#include "sample/rows.inc"

}  // namespace

const ScoreKernels& score_kernels_plain() { return kernels; }

}  // namespace specens
