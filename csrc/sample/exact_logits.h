// One member's logits at one position to the last bit, as scores need them.
#pragma once

#include <cstdint>
#include <limits>

#include "parts/sources.h"

namespace specens {

// NaN counts as -inf, +inf as the largest float.
class ExactLogits {
  public:
    explicit ExactLogits(const LogitRow& row) : row_(row) {}
    int64_t vocab() const { return row_.vocab; }
    // A tile where nothing changes it, else a copy; edited numbers are rounded up, others are as they are.
    TypedLogits tile(int64_t tile, float* scratch) const;
    // The same floats of a run of tokens in one tile, which begins at a multiple of 32.
    const float* run(int64_t first, int64_t count, float* scratch) const;
    double logit(int64_t token) const;

  private:
    bool edited(int64_t tile) const { return row_.edits != nullptr && row_.edits->touches(tile); }
    const void* address(int64_t token) const;
    LogitRow row_;
};

}  // namespace specens
