// Draws by inverse CDF: block masses first, then inside one block.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "parts/rows.h"

namespace specens {

// The lowest token whose cumulative mass exceeds uniform * total mass, -1 where no token has mass.
// tile_masses: of each tile. fill(tile, out): writes the masses, >= 0, of a tile's tokens to `out`.
template <typename Fill>
int64_t draw(const std::vector<double>& tile_masses, int64_t vocab, double uniform, Fill fill);

// Likewise, whose cumulative mass exceeds the target, else one of the last with mass.
template <typename Fill>
int64_t draw_at(const std::vector<double>& tile_masses, int64_t vocab, double target, Fill fill);

// First token of `masses` at which the running sum exceeds `target`, else the last one with mass, else -1.
int64_t first_exceeding(const float* masses, int64_t count, double target);

template <typename Fill>
int64_t draw(const std::vector<double>& tile_masses, int64_t vocab, double uniform, Fill fill) {
    return draw_at(tile_masses, vocab, uniform * std::accumulate(tile_masses.begin(), tile_masses.end(), 0.0), fill);
}

template <typename Fill>
int64_t draw_at(const std::vector<double>& tile_masses, int64_t vocab, double target, Fill fill) {
    const auto tiles = static_cast<int64_t>(tile_masses.size());
    int64_t chosen = 0;
    double before = 0;
    while (chosen + 1 < tiles && !(before + tile_masses[chosen] > target)) {
        before += tile_masses[chosen];
        ++chosen;
    }
    // A tile's mass and the sum of its tokens' differ by rounding, so a chosen tile can turn out empty: the next one
    // with mass is taken, then the one before.
    alignas(64) float masses[tile_size];
    for (int64_t offset = 0; offset < tiles; ++offset) {
        const int64_t tile = chosen + offset < tiles ? chosen + offset : tiles - 1 - offset;
        const int64_t width = std::min(tile_size, vocab - tile * tile_size);
        fill(tile, masses);
        const int64_t found = first_exceeding(masses, width, offset == 0 ? target - before : 0.0);
        if (found >= 0) {
            return tile * tile_size + found;
        }
    }
    return -1;
}

}  // namespace specens
