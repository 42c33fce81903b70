// Arithmetic of Gumbel scores on blocks of neighbouring tokens. One table of functions for each instruction set.
#pragma once

#include <cstdint>

namespace specens {

constexpr int64_t block_size = 128;  // part of the noise's definition

// Whose noise: a seed, and the absolute position of the token. first_block: of the row, where it is a later part of the
// vocabulary; tokens and blocks count from there.
struct NoiseKey {
    uint64_t seed, position;
    uint32_t first_block = 0;
};

constexpr int64_t score_lanes = 16;  // arrays have room for multiples of it

struct ScoreKernels {
    // out[i] = at least the largest noise of block first + i; argmax[i] = which of the block's tokens has it
    void (*block_bounds)(NoiseKey key, int64_t first, int64_t count, float* out, uint32_t* argmax);
    // out[i] = the random word of a token that does not have its block's largest noise
    void (*token_words)(NoiseKey key, const uint32_t* tokens, int64_t count, uint32_t* out);
    // bits[i / 64] gets bit i % 64 where values[i] >= limit; up to block_size values, the rest of 2 words is 0
    void (*at_least)(const float* values, int64_t count, float limit, uint64_t* bits);
    // totals[i] += weight * logits[i], where NaN counts as -inf, +inf as the largest float; -inf where the logit is
    void (*mix)(const float* logits, int64_t count, double weight, double* totals);
    // bounds[i] = at least (maxima[i] - origin) / 2 * factor + noise[i], where no maximum is above the origin; -inf
    // where it is. best[16 s + lane] = the largest of bounds[256 s + 16 k + lane] for k below 16. count: of whole 16.
    void (*score_bounds)(const float* maxima, int64_t count, float origin, float factor, const float* noise,
                         float* bounds, float* best);
};

const ScoreKernels& score_kernels();  // of the instruction set in use

const ScoreKernels& score_kernels_plain();
const ScoreKernels& score_kernels_avx2();
const ScoreKernels& score_kernels_avx512();
const ScoreKernels& score_kernels_neon();

}  // namespace specens
