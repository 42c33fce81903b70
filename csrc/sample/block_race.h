// Which tokens of a row can have the best scores: blocks of 128 neighbours are looked at only where the largest value
// and the largest noise together reach the best score so far.
#pragma once

#include <bit>
#include <optional>
#include <vector>

#include "parts/sources.h"
#include "sample/best_list.h"
#include "sample/noise.h"

namespace specens {

static_assert(block_size == group_size && tile_size % block_size == 0);

constexpr int64_t blocks_per_tile = tile_size / block_size;

// Calls visit(index) for the bits of 128 that are set.
template <typename Visit>
inline void for_bits(const uint64_t* bits, const Visit& visit) {
    for (int64_t half = 0; half < 2; ++half) {
        for (uint64_t left = bits[half]; left != 0; left &= left - 1) {
            visit(half * 64 + std::countr_zero(left));
        }
    }
}

// A finite float that is below a number, unless that is below all of them.
inline float float_below(double number) {
    constexpr float largest = std::numeric_limits<float>::max();
    const double below = number - std::abs(number) * 0x1p-22 - 1e-30;
    return below > -largest ? static_cast<float>(std::min(below, double{largest})) : -largest;
}

// Tokens of which a random word each is still to be drawn, many at once.
class WaitingTokens {
  public:
    void reserve(const Sizes& most) { reserve_all(2 * most.tokens() + score_lanes, ids_, words_); }
    // How many more ids are written to the buffer that is returned, of which `added` then tells.
    uint32_t* room(int64_t more) {
        if (static_cast<int64_t>(ids_.size()) < count_ + more + score_lanes) {
            ids_.resize(2 * (count_ + more) + score_lanes);
        }
        return ids_.data() + count_;
    }
    void added(int64_t more) { count_ += more; }
    int64_t count() const { return count_; }
    const uint32_t* ids() const { return ids_.data(); }
    const uint32_t* draw(NoiseKey key) {
        std::fill_n(room(0), score_lanes, 0u);
        words_.resize(ids_.size());
        score_kernels().token_words(key, ids_.data(), count_, words_.data());
        return words_.data();
    }
    void clear() { count_ = 0; }

  private:
    int64_t count_ = 0;
    std::vector<uint32_t> ids_, words_;
};

// The noise of a row's tokens; none for greedy requests.
class RowNoise {
  public:
    void reserve(const Sizes& most) { reserve_all(most.blocks(), bound_, argmax_); }
    void start(const std::optional<NoiseKey>& key, int64_t vocab);
    // Draws what bounds the noise of the blocks of some tiles, the faster the more there are; threads may do so for
    // different tiles at once.
    void draw_tiles(int64_t begin, int64_t end);
    int64_t blocks() const { return blocks_; }
    bool any() const { return key_.has_value(); }
    const NoiseKey& key() const { return *key_; }
    // Once their tiles are drawn: no noise of a block is larger. There is room for whole tiles of blocks.
    const float* bounds() const { return bound_.data(); }
    float bound(int64_t block) const { return bound_[block]; }
    // Which of its block's tokens has the largest noise.
    uint32_t argmax(int64_t block) const { return argmax_[block]; }
    LargestNoise largest(int64_t block) const {
        return any() ? largest_noise(*key_, block) : LargestNoise{1, block * block_size};
    }
    // value + noise
    double score(int64_t token, double value, const LargestNoise& largest) const {
        return any() && token != largest.token
                   ? score(value, largest,
                           noise_words(*key_, word_index(*key_, token), rest_stream).word[word_number(token)])
                   : value - std::log(largest.exp_minus);
    }
    // Of a token that does not have the largest noise, from its random word.
    static double score(double value, const LargestNoise& largest, uint32_t word) {
        return value - std::log(largest.exp_minus + minus_log_word(word));
    }

  private:
    std::optional<NoiseKey> key_;
    int64_t blocks_ = 0;
    std::vector<float> bound_;
    std::vector<uint32_t> argmax_;
};

// The bounds of a row's scores by block, and which blocks are still to be looked at.
class BlockBounds {
  public:
    void reserve(const Sizes& most) {
        reserve_all(most.blocks(), bounds_);
        reserve_all(most.tiles() + score_lanes, best_);
    }
    // maxima: not above the origin, with room for whole tiles of blocks.
    void start(const std::vector<float>& maxima, float origin, double temperature, const RowNoise& noise);
    // The block of the largest bound, which is taken out; -1 where none reaches the limit.
    int64_t pop(double limit);
    bool reaches(int64_t block, double limit) const { return bounds_[block] >= float_below(limit); }
    // Calls visit(block) for what is left and reaches the limit, in order.
    template <typename Visit>
    void for_rest(double limit, const Visit& visit) const {
        const auto count = static_cast<int64_t>(bounds_.size());
        for (int64_t first = 0; first < count; first += block_size) {
            uint64_t bits[2];
            score_kernels().at_least(bounds_.data() + first, std::min(block_size, count - first), float_below(limit),
                                     bits);
            for_bits(bits, [&](int64_t index) { visit(first + index); });
        }
    }

  private:
    std::vector<float> bounds_;
    std::vector<float> best_;  // of each 16 blocks that are 16 apart
};

}  // namespace specens
