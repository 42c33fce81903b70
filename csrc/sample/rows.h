// Arithmetic of Gumbel scores on blocks of neighbouring tokens. One table of functions for each instruction set.
#pragma once

#include <cstdint>

namespace specens {

constexpr int64_t block_size = 128;  // part of the noise's definition

// Whose noise: a seed, and the absolute position of the token.
struct NoiseKey {
    uint64_t seed, position;
};

// What random numbers say of each block.
struct BlockNoise {
    uint32_t *high, *low, *place;  // the first three words
    float* bound;                  // not below the block's largest noise
};

struct ScoreKernels {
    // The noise of blocks first .. first + count - 1.
    void (*block_noise)(NoiseKey key, int64_t first, int64_t count, const BlockNoise& out);
    // bits[i / 64] gets bit i % 64 where values[i] >= limit; up to block_size values, the rest of 2 words is 0
    void (*at_least)(const float* values, int64_t count, float limit, uint64_t* bits);
    // totals[i] += weight * logits[i], where NaN counts as -inf, +inf as the largest float; -inf where the logit is
    void (*mix)(const float* logits, int64_t count, double weight, double* totals);
    // bounds[i] = (maxima[i] - origin) * factor + noise[i], -inf where the maximum is; returns the largest
    double (*score_bounds)(const double* maxima, int64_t count, double origin, double factor, const float* noise,
                           double* bounds);
};

const ScoreKernels& score_kernels();  // of the instruction set in use

const ScoreKernels& score_kernels_plain();
const ScoreKernels& score_kernels_avx2();
const ScoreKernels& score_kernels_avx512();

}  // namespace specens
