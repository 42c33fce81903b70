#include "sample/block_race.h"

namespace specens {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

}  // namespace

void RowNoise::start(const std::optional<NoiseKey>& key, int64_t vocab) {
    key_ = key;
    blocks_ = (vocab + block_size - 1) / block_size;
    if (!any()) {
        bound_.assign(blocks_, 0.0f);
        return;
    }
    bound_.resize(blocks_);
    for (std::vector<uint32_t>* words : {&high_, &low_, &place_}) {
        words->resize(blocks_);
    }
}

void RowNoise::draw_tile(int64_t tile) {
    const int64_t first = tile * blocks_per_tile;
    if (any() && first < blocks_) {
        const BlockNoise out{high_.data() + first, low_.data() + first, place_.data() + first, bound_.data() + first};
        score_kernels().block_noise(*key_, first, std::min(blocks_per_tile, blocks_ - first), out);
    }
}

double RowNoise::draw_block(int64_t block) {
    if (any()) {
        const BlockNoise out{high_.data() + block, low_.data() + block, place_.data() + block, bound_.data() + block};
        score_kernels().block_noise(*key_, block, 1, out);
    }
    return exp_minus_largest(block);
}

double RowNoise::score(int64_t token, double value, double exp_minus_block_largest) const {
    if (!any() || value == -infinity) {
        return value;
    }
    const bool largest = token % block_size == place_of_largest(place_[token / block_size]);
    return value - std::log(largest ? exp_minus_block_largest : exp_minus_noise(*key_, token, exp_minus_block_largest));
}

void BlockOrder::start(const std::vector<double>& maxima, double origin, double factor, const RowNoise& noise) {
    const auto blocks = static_cast<int64_t>(maxima.size());
    bounds_.resize(blocks);
    tile_bounds_.resize((blocks + blocks_per_tile - 1) / blocks_per_tile);
    for (int64_t first = 0; first < blocks; first += blocks_per_tile) {
        const int64_t count = std::min(blocks_per_tile, blocks - first);
        tile_bounds_[first / blocks_per_tile] = score_kernels().score_bounds(
            maxima.data() + first, count, origin, factor, noise.bounds() + first, bounds_.data() + first);
    }
}

int64_t BlockOrder::pop(double limit) {
    const auto tile = std::max_element(tile_bounds_.begin(), tile_bounds_.end()) - tile_bounds_.begin();
    if (tile_bounds_[tile] == -infinity || tile_bounds_[tile] < limit) {
        return -1;
    }
    const auto begin = bounds_.begin() + tile * blocks_per_tile;
    const auto end = bounds_.begin() + std::min<int64_t>(bounds_.size(), (tile + 1) * blocks_per_tile);
    const auto best = std::find(begin, end, tile_bounds_[tile]);
    *best = -infinity;
    tile_bounds_[tile] = *std::max_element(begin, end);
    return best - bounds_.begin();
}

}  // namespace specens
