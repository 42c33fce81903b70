// Threads of torch's pool: over requests, or over the tiles of one long row where there are fewer requests than
// threads.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstdint>

#include "parts/rows.h"

namespace specens {

constexpr int64_t tiles_per_thread = 32;  // less work than this is not worth waking a thread

inline bool is_long_row(int64_t tiles) { return tiles >= 2 * tiles_per_thread; }

// Calls run(begin, end) over ranges of tiles. Inside a range of requests that runs in parallel it stays on its thread.
template <typename Run>
void for_tiles(int64_t tiles, bool splittable, const Run& run) {
    if (splittable && is_long_row(tiles)) {
        torch::stable::parallel_for(0, tiles, tiles_per_thread, run);
    } else {
        run(int64_t{0}, tiles);
    }
}

// Calls run(begin, end) over ranges of requests.
template <typename Run>
void for_requests(int64_t requests, int64_t vocab, const Run& run) {
    if (requests == 1 || (requests < torch::stable::get_num_threads() && is_long_row(vocab / tile_size))) {
        run(int64_t{0}, requests);
    } else {
        torch::stable::parallel_for(0, requests, 1, run);
    }
}

}  // namespace specens
