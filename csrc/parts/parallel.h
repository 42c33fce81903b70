// The caller's threads: over requests, or over the tiles of one long row where there are fewer requests than threads.
#pragma once

#include <cstdint>
#include <exception>
#include <mutex>

#include "include/specens.h"
#include "parts/rows.h"

namespace specens {

constexpr int64_t tiles_per_thread = 32;  // less work than this is not worth waking a thread

// The threads of the call that this thread is in; nullptr: it runs on its own.
inline thread_local const specens_threads* threads_of_call = nullptr;

class ThreadsOfCall {
  public:
    explicit ThreadsOfCall(const specens_threads* threads) : before_(threads_of_call) { threads_of_call = threads; }
    ~ThreadsOfCall() { threads_of_call = before_; }
    ThreadsOfCall(const ThreadsOfCall&) = delete;
    ThreadsOfCall& operator=(const ThreadsOfCall&) = delete;

  private:
    const specens_threads* before_;
};

// Calls run(begin, end) over ranges that make up 0 to end, on several threads. Inside such a range all stays on its
// thread.
template <typename Run>
void parallel_for(int64_t end, int64_t grain, const Run& run) {
    const specens_threads* threads = threads_of_call;
    if (threads == nullptr || threads->num_threads < 2 || end <= grain) {
        if (end > 0) {
            run(int64_t{0}, end);
        }
        return;
    }
    struct Shared {
        const Run& run;
        std::mutex mutex;
        std::exception_ptr error;
    } shared{run, {}, nullptr};
    const specens_range range = [](void* of_range, int64_t first, int64_t last) {
        auto& own = *static_cast<Shared*>(of_range);
        const ThreadsOfCall alone(nullptr);
        try {
            own.run(first, last);
        } catch (...) {
            const std::lock_guard lock(own.mutex);
            own.error = std::current_exception();
        }
    };
    threads->run(threads->context, end, grain, range, &shared);
    if (shared.error) {
        std::rethrow_exception(shared.error);
    }
}

inline bool is_long_row(int64_t tiles) { return tiles >= 2 * tiles_per_thread; }

// Calls run(begin, end) over ranges of tiles. Inside a range of requests that runs in parallel it stays on its thread.
template <typename Run>
void for_tiles(int64_t tiles, bool splittable, const Run& run) {
    if (splittable && is_long_row(tiles)) {
        parallel_for(tiles, tiles_per_thread, run);
    } else {
        run(int64_t{0}, tiles);
    }
}

// Calls run(begin, end) over ranges of requests.
template <typename Run>
void for_requests(int64_t requests, int64_t vocab, const Run& run) {
    const int64_t threads = threads_of_call != nullptr ? threads_of_call->num_threads : 1;
    if (requests == 1 || (requests < threads && is_long_row(vocab / tile_size))) {
        run(int64_t{0}, requests);
    } else {
        parallel_for(requests, 1, run);
    }
}

}  // namespace specens
