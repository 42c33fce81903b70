// Which tokens of a row can have the best scores: blocks of 128 neighbours are looked at only where the largest value
// and the largest noise together reach the best score so far.
#pragma once

#include <optional>
#include <vector>

#include "parts/rows.h"
#include "sample/best_list.h"
#include "sample/noise.h"

namespace specens {

static_assert(block_size == group_size && tile_size % block_size == 0);

constexpr int64_t blocks_per_tile = tile_size / block_size;

// The noise of a row's blocks; none for greedy requests.
class RowNoise {
  public:
    void start(const std::optional<NoiseKey>& key, int64_t vocab);
    // Draws the numbers of a tile's blocks; threads may draw those of different tiles at once.
    void draw_tile(int64_t tile);
    const float* bounds() const { return bound_.data(); }
    float bound(int64_t block) const { return bound_[block]; }
    int64_t blocks() const { return blocks_; }
    // A block's largest noise, as exp(-noise), and the token that has it.
    double exp_minus_largest(int64_t block) const {
        return any() ? specens::exp_minus_largest(high_[block], low_[block]) : 1;
    }
    int64_t token_of_largest(int64_t block) const {
        return block * block_size + (any() ? place_of_largest(place_[block]) : 0);
    }
    // The first of these, of a block that was not drawn with its tile.
    double draw_block(int64_t block);
    // value + noise, given the block's exp(-largest)
    double score(int64_t token, double value, double exp_minus_block_largest) const;
    bool any() const { return key_.has_value(); }

  private:
    std::optional<NoiseKey> key_;
    int64_t blocks_ = 0;
    std::vector<uint32_t> high_, low_, place_;
    std::vector<float> bound_;
};

// Blocks in falling order of their bounds at first, which raises the best score, then in order.
class BlockOrder {
  public:
    // Of a row's blocks, (maxima - origin) * factor + noise.
    void start(const std::vector<double>& maxima, double origin, double factor, const RowNoise& noise);
    // The block of the largest bound, which is taken out; -1 where none is at least the limit.
    int64_t pop(double limit);
    // Calls visit(block) in order for what is left while bound >= limit().
    template <typename Limit, typename Visit>
    void for_rest(const Limit& limit, const Visit& visit) const {
        for (size_t tile = 0; tile < tile_bounds_.size(); ++tile) {
            const size_t end = std::min(bounds_.size(), (tile + 1) * blocks_per_tile);
            for (size_t block = tile * blocks_per_tile; tile_bounds_[tile] >= limit() && block < end; ++block) {
                if (bounds_[block] >= limit() && bounds_[block] > -std::numeric_limits<double>::infinity()) {
                    visit(static_cast<int64_t>(block));
                }
            }
        }
    }

  private:
    std::vector<double> bounds_, tile_bounds_;
};

}  // namespace specens
