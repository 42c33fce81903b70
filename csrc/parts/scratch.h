// Scratch memory that is kept from call to call.
#pragma once

#include <algorithm>
#include <memory>
#include <mutex>
#include <vector>

#include "include/specens.h"
#include "parts/rows.h"

namespace specens {

// The largest sizes of calls to come.
struct Sizes : specens_sizes {
    int64_t tiles() const { return tile_count(vocab); }
    int64_t tokens() const { return tiles() * tile_size; }  // of whole tiles
    int64_t blocks() const { return tiles() * groups_per_tile; }
    int64_t steps() const { return std::max(draft_len, nodes) + 1; }
};

template <typename... Lists>
void reserve_all(int64_t count, Lists&... lists) {
    (lists.reserve(static_cast<size_t>(count)), ...);
}

// Of a workspace: one for each thread that was ever at work in it at once.
template <typename Scratch>
class ScratchPool {
  public:
    std::unique_ptr<Scratch> take() {
        {
            const std::lock_guard lock(mutex_);
            if (!free_.empty()) {
                std::unique_ptr<Scratch> last = std::move(free_.back());
                free_.pop_back();
                return last;
            }
        }
        return std::make_unique<Scratch>();
    }
    void give_back(std::unique_ptr<Scratch> scratch) {
        const std::lock_guard lock(mutex_);
        free_.push_back(std::move(scratch));
    }

    // So many, of which each call of these sizes finds all memory that it needs.
    void reserve(int64_t count, const Sizes& most) {
        const std::lock_guard lock(mutex_);
        free_.reserve(count);
        while (static_cast<int64_t>(free_.size()) < count) {
            free_.push_back(std::make_unique<Scratch>());
        }
        for (const std::unique_ptr<Scratch>& own : free_) {
            own->reserve(most);
        }
    }

  private:
    std::mutex mutex_;
    std::vector<std::unique_ptr<Scratch>> free_;
};

// That of a pool, or without one that of this thread.
template <typename Scratch>
class Borrowed {
  public:
    explicit Borrowed(ScratchPool<Scratch>* pool)
        : pool_(pool), own_(pool != nullptr ? pool->take() : nullptr), used_(pool != nullptr ? *own_ : of_thread()) {}
    ~Borrowed() {
        if (own_ != nullptr) {
            pool_->give_back(std::move(own_));
        }
    }
    Borrowed(const Borrowed&) = delete;
    Borrowed& operator=(const Borrowed&) = delete;
    Scratch& operator*() { return used_; }
    Scratch* operator->() { return &used_; }

  private:
    static Scratch& of_thread() {
        static thread_local Scratch scratch;
        return scratch;
    }

    ScratchPool<Scratch>* pool_;
    std::unique_ptr<Scratch> own_;
    Scratch& used_;
};

}  // namespace specens
