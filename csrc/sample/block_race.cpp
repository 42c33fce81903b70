#include "sample/block_race.h"

namespace specens {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

}  // namespace

void RowNoise::start(const std::optional<NoiseKey>& key, int64_t vocab) {
    key_ = key;
    blocks_ = (vocab + block_size - 1) / block_size;
    bound_.resize(tile_count(vocab) * blocks_per_tile);
    argmax_.resize(bound_.size());
    if (!any()) {
        std::fill(bound_.begin(), bound_.end(), 0.0f);
    }
}

void RowNoise::draw_tiles(int64_t begin, int64_t end) {
    const int64_t first = begin * blocks_per_tile;
    const int64_t count = std::min(end * blocks_per_tile, static_cast<int64_t>(bound_.size())) - first;
    if (any() && count > 0) {
        score_kernels().block_bounds(*key_, first, count, bound_.data() + first, argmax_.data() + first);
    }
}

void BlockBounds::start(const std::vector<float>& maxima, float origin, double temperature, const RowNoise& noise) {
    // a smaller factor only loosens the bounds
    const auto factor = static_cast<float>(std::min(2 / temperature, double{std::numeric_limits<float>::max()}));
    bounds_.resize(maxima.size());
    tile_bounds_.resize(maxima.size() / blocks_per_tile);
    score_kernels().score_bounds(maxima.data(), static_cast<int64_t>(maxima.size()), origin, factor, noise.bounds(),
                                 bounds_.data(), tile_bounds_.data());
}

int64_t BlockBounds::pop(double limit) {
    const auto tile = std::max_element(tile_bounds_.begin(), tile_bounds_.end()) - tile_bounds_.begin();
    if (tile_bounds_[tile] < float_below(limit)) {
        return -1;
    }
    const auto begin = bounds_.begin() + tile * blocks_per_tile;
    const auto best = std::find(begin, begin + blocks_per_tile, tile_bounds_[tile]);
    *best = -infinity;
    tile_bounds_[tile] = *std::max_element(begin, begin + blocks_per_tile);
    return best - bounds_.begin();
}

}  // namespace specens
