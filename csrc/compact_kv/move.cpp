#include <cstring>

#include "compact_kv/arguments.h"
#include "parts/parallel.h"

namespace specens {
namespace {

// Moving fewer bytes than this takes less time than waking a thread.
constexpr int64_t bytes_per_thread = 1024 * 1024;

// Slots that move together, none of them across the end of a block.
struct Span {
    Move first;
    int64_t slots;

    bool goes_on(const Move& next) const {
        return next.from.block == first.from.block && next.from.offset == first.from.offset + slots &&
               next.to.block == first.to.block && next.to.offset == first.to.offset + slots;
    }
};

// The spans of all requests, those of a request together.
struct Spans {
    std::vector<Span> spans;
    std::vector<int64_t> ends;  // [batch]
    int64_t slots = 0;          // that move, of all requests

    explicit Spans(const Moves& moves) {
        ends.reserve(moves.batch);
        for (int64_t request = 0; request < moves.batch; ++request) {
            const int64_t count = count_kept(moves, request, 0, 1);
            const bool sound = is_sound(moves, request, count, 0, 1);
            write_result(moves, request, count, sound);
            if (sound) {
                add(moves, request, count);
            }
            ends.push_back(static_cast<int64_t>(spans.size()));
        }
    }
    void add(const Moves& moves, int64_t request, int64_t count) {
        const size_t first = spans.size();
        for (int64_t target = 0; target < count; ++target) {
            const Move move = find_move(moves, request, target);
            if (!move.moves()) {
                continue;
            }
            ++slots;
            if (spans.size() > first && spans.back().goes_on(move)) {
                ++spans.back().slots;
            } else {
                spans.push_back({move, 1});
            }
        }
    }
};

void move_row(const Spans& spans, const CacheView& cache, int64_t request, char* row) {
    const bool dense = cache.stride_slot == cache.slot_bytes;
    for (int64_t index = request == 0 ? 0 : spans.ends[request - 1]; index < spans.ends[request]; ++index) {
        const Span& span = spans.spans[index];
        char* to = row + cache.offset(span.first.to);
        const char* from = row + cache.offset(span.first.from);
        const int64_t bytes = dense ? span.slots * cache.slot_bytes : cache.slot_bytes;
        for (int64_t slot = 0; slot < (dense ? 1 : span.slots); ++slot) {
            std::memmove(to + slot * cache.stride_slot, from + slot * cache.stride_slot, bytes);
        }
    }
}

// A unit of work is a request's row in a cache; the units of a cache follow those of the one before.
void move_all(const Spans& spans, const std::vector<CacheView>& caches, int64_t batch) {
    std::vector<int64_t> ends;
    int64_t units = 0, bytes = 0;
    for (const CacheView& cache : caches) {
        ends.push_back(units += cache.rows * batch);
        bytes += cache.rows * cache.slot_bytes * spans.slots;
    }
    const int64_t grain = std::max<int64_t>(1, units * bytes_per_thread / std::max<int64_t>(1, bytes));
    parallel_for(units, grain, [&](int64_t begin, int64_t end) {
        size_t cache = std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin();
        for (int64_t unit = begin; unit < end; ++unit) {
            while (unit >= ends[cache]) {
                ++cache;
            }
            const int64_t index = unit - (cache == 0 ? 0 : ends[cache - 1]), rows = caches[cache].rows;
            move_row(spans, caches[cache], index / rows, caches[cache].row(index % rows));
        }
    });
}

}  // namespace

void move_slots(const CompactArguments& arguments) {
    const Spans spans(arguments.moves);
    if (spans.slots > 0) {
        move_all(spans, arguments.caches, arguments.moves.batch);
    }
}

}  // namespace specens
