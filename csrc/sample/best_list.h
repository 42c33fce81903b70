// Tokens and their scores, of which the best are kept.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "parts/scratch.h"

namespace specens {

struct Scored {
    double score;
    int64_t token;
    // The lowest id wins a tie.
    bool better_than(const Scored& other) const {
        return score > other.score || (score == other.score && token < other.token);
    }
};

// The `count` best, best first, and those which rounding may have put below the last of them.
class BestList {
  public:
    void reserve(const Sizes& most) { reserve_all(most.tokens() + 1, list_); }
    // margin: what rounding can change in the difference of two scores, and 2^-21 of them more; 0: nothing.
    void start(int64_t count, double margin) {
        count_ = static_cast<size_t>(count);
        margin_ = margin;
        list_.clear();
    }
    size_t count() const { return count_; }
    // A token whose score is below this is not among the best.
    double limit() const {
        return list_.size() < count_ ? -std::numeric_limits<double>::infinity() : below(list_[count_ - 1].score);
    }
    // Takes a token; one may come several times.
    void add(const Scored& own) {
        if (own.score == -std::numeric_limits<double>::infinity() || own.score < limit()) {
            return;
        }
        auto at = list_.begin();
        for (; at != list_.end() && at->better_than(own); ++at) {
        }
        if (at != list_.end() && at->token == own.token && at->score == own.score) {
            return;
        }
        list_.insert(at, own);
        while (list_.size() > count_ && (margin_ == 0 || list_.back().score < limit())) {
            list_.pop_back();
        }
    }
    const std::vector<Scored>& list() const { return list_; }
    // Whether rounding could change the order of the best.
    bool ambiguous() const {
        for (size_t index = 0; margin_ > 0 && index + 1 < list_.size() && index < count_; ++index) {
            if (list_[index + 1].score >= below(list_[index].score)) {
                return true;
            }
        }
        return false;
    }

  private:
    double below(double score) const { return margin_ > 0 ? score - margin_ - std::abs(score) * 0x1p-21 : score; }
    size_t count_ = 1;
    double margin_ = 0;
    std::vector<Scored> list_;
};

}  // namespace specens
