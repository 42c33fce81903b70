// Scratch memory that is kept from call to call.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

namespace specens {

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
