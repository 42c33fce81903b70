#include <algorithm>
#include <cstring>

#include "compact_kv/arguments.h"
#include "parts/parallel.h"

namespace specens {
namespace {

// Moving fewer bytes than this takes less time than waking a thread.
constexpr int64_t bytes_per_thread = 1024 * 1024;

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
void move_all(const Spans& spans, std::span<const CacheView> caches, int64_t batch) {
    InlineList<int64_t, usual_caches> ends;
    int64_t units = 0, bytes = 0;
    for (const CacheView& cache : caches) {
        ends.push_back(units += cache.rows * batch);
        bytes += cache.rows * cache.slot_bytes * spans.slots;
    }
    const int64_t grain = std::max<int64_t>(1, units * bytes_per_thread / std::max<int64_t>(1, bytes));
    parallel_for(units, grain, [&](int64_t begin, int64_t end) {
        size_t cache = std::ranges::upper_bound(ends.all(), begin) - ends.all().begin();
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

void move_slots(const CompactArguments& arguments, ScratchPool<Spans>* pool) {
    Borrowed<Spans> spans(pool);
    spans->read(arguments.moves);
    if (spans->slots > 0) {
        move_all(*spans, arguments.caches.all(), arguments.moves.batch);
    }
}

}  // namespace specens
