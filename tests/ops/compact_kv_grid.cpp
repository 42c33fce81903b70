// Runs the CUDA grid of compact_kv on the CPU, thread after thread in a given order, so that its body can be tested
// without a GPU. Compiled by test_compact_kv_grid.py.
#include <algorithm>
#include <vector>

#include "compact_kv/moves.h"

using namespace specens;

namespace {

// The steps between two barriers of the kernel, each for all threads of a block.
int64_t judge(const Moves& moves, int64_t request, const std::vector<int64_t>& threads) {
    const auto lanes = static_cast<int64_t>(threads.size());
    int64_t count = INT64_MAX;
    for (const int64_t thread : threads) {
        count = std::min(count, count_kept(moves, request, thread, lanes));
    }
    bool sound = true;
    for (const int64_t thread : threads) {
        sound &= is_sound(moves, request, count, thread, lanes);
    }
    return sound ? count : -1;
}

void run_block(const Moves& moves, const CacheView& cache, int64_t block, const std::vector<int64_t>& threads) {
    const auto lanes = static_cast<int64_t>(threads.size());
    std::vector<Move> found(lanes);
    for (int64_t request = 0; request < moves.batch; ++request) {
        const int64_t count = judge(moves, request, threads);
        if (block == 0) {
            write_result(moves, request, count, count >= 0);
        }
        for (int64_t first = 0; first < count; first += lanes) {
            const int64_t part = std::min(count - first, lanes);
            for (const int64_t thread : threads) {
                if (thread < part) {
                    found[thread] = find_move(moves, request, first + thread);
                }
            }
            for (const int64_t thread : threads) {
                move_part(found.data(), part, cache, block * lanes + thread);
            }
        }
    }
}

}  // namespace

extern "C" void run_grid(const Moves* moves, const CacheView* cache, const int64_t* order, int64_t threads_per_block) {
    const std::vector<int64_t> threads(order, order + threads_per_block);
    const int64_t blocks = std::max<int64_t>(1, (thread_count(*cache) + threads_per_block - 1) / threads_per_block);
    for (int64_t block = 0; block < blocks; ++block) {
        run_block(*moves, *cache, block, threads);
    }
}
