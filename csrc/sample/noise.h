// Gumbel noise as a function of a seed, a position and a token, in two levels: the largest of each block of 128 tokens
// and its place, then the others below it. `specens_kernels.ops.sample.gumbel` is the definition.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "parts/philox.h"
#include "sample/rows.h"

namespace specens {

constexpr uint32_t maximum_stream = 3;
constexpr uint32_t rest_stream = 4;

// exp(-noise) of a block's largest, from its first two words.
inline double exp_minus_largest(uint32_t high, uint32_t low) {
    const auto bits = static_cast<double>((uint64_t{high >> 5} << 26) + (low >> 6));
    const double unit = std::min((bits + 0.5) * 0x1p-53, 1 - 0x1p-53);
    return -std::log(unit) / static_cast<double>(block_size);
}

inline int64_t place_of_largest(uint32_t word) { return word >> 25; }

// exp(-noise) of a token that is not the place of its block's largest, whose exp(-noise) is given.
inline double exp_minus_noise(NoiseKey key, int64_t token, double exp_minus_largest) {
    constexpr int64_t tokens_per_word = block_size / 4;
    const auto index = static_cast<uint32_t>(token / block_size * tokens_per_word + token % tokens_per_word);
    const PhiloxCounter counter{
        {static_cast<uint32_t>(key.position), static_cast<uint32_t>(key.position >> 32), index, rest_stream}};
    const PhiloxKey philox_key{{static_cast<uint32_t>(key.seed), static_cast<uint32_t>(key.seed >> 32)}};
    const uint32_t word = philox4x32_10(counter, philox_key).word[token % block_size / tokens_per_word];
    return exp_minus_largest - std::log((word + 0.5) * 0x1p-32);
}

}  // namespace specens
