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
constexpr int64_t tokens_per_word = block_size / 4;

inline PhiloxCounter noise_words(NoiseKey key, uint32_t index, uint32_t stream) {
    return philox4x32_10(
        {{static_cast<uint32_t>(key.position), static_cast<uint32_t>(key.position >> 32), index, stream}},
        {{static_cast<uint32_t>(key.seed), static_cast<uint32_t>(key.seed >> 32)}});
}

// The largest noise of a block, and the token that has it.
struct LargestNoise {
    double exp_minus;  // exp(-noise)
    int64_t token;
};

inline uint32_t argmax_of(uint32_t word) { return word >> 25; }

inline LargestNoise largest_noise(NoiseKey key, int64_t block) {
    const PhiloxCounter words = noise_words(key, key.first_block + static_cast<uint32_t>(block), maximum_stream);
    const auto bits = static_cast<double>((uint64_t{words.word[0] >> 5} << 26) + (words.word[1] >> 6));
    const double unit = std::min((bits + 0.5) * 0x1p-53, 1 - 0x1p-53);
    return {-std::log(unit) / static_cast<double>(block_size), block * block_size + argmax_of(words.word[2])};
}

// Where the random numbers of a token are.
inline uint32_t word_index(NoiseKey key, int64_t token) {
    const uint32_t block = key.first_block + static_cast<uint32_t>(token / block_size);
    return block * static_cast<uint32_t>(tokens_per_word) + static_cast<uint32_t>(token % tokens_per_word);
}
inline uint8_t word_number(int64_t token) { return static_cast<uint8_t>(token % block_size / tokens_per_word); }

// -log of a token's own number; exp(-noise) is that of its block's largest plus this.
inline double minus_log_word(uint32_t word) { return -std::log((word + 0.5) * 0x1p-32); }

}  // namespace specens
