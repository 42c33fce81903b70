#include "sample/block_race.h"

namespace specens {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr int64_t stretch = score_lanes * score_lanes;  // blocks of which the best of each 16 that are 16 apart is kept

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
    best_.resize((maxima.size() + stretch - 1) / stretch * score_lanes);
    score_kernels().score_bounds(maxima.data(), static_cast<int64_t>(maxima.size()), origin, factor, noise.bounds(),
                                 bounds_.data(), best_.data());
}

int64_t BlockBounds::pop(double limit) {
    const auto most = std::max_element(best_.begin(), best_.end());
    if (*most < float_below(limit)) {
        return -1;
    }
    const int64_t index = most - best_.begin();
    const int64_t first = index / score_lanes * stretch + index % score_lanes;
    const int64_t end = std::min(first + stretch, static_cast<int64_t>(bounds_.size()));
    int64_t found = -1;
    float next = -infinity;
    for (int64_t block = first; block < end; block += score_lanes) {
        if (found < 0 && bounds_[block] == *most) {
            found = block;
        } else {
            next = std::max(next, bounds_[block]);
        }
    }
    bounds_[found] = -infinity;
    *most = next;
    return found;
}

}  // namespace specens
