// Filters of sampling (top-k, top-p, min-p) as one threshold: the least value, monotone in probability, that is kept.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "parts/scratch.h"

namespace specens {

struct FilterParameters {
    int64_t top_k = 0;         // 0: off
    double top_p = 1;          // 1: off
    double min_p = 0;          // 0: off
    bool min_p_first = false;  // before the others, else after them
    bool any() const { return top_k > 0 || top_p < 1 || min_p > 0; }
    bool operator==(const FilterParameters&) const = default;
};

// A row of values as a search sees it: what it must read of it, and when.
class SearchedRow {
  public:
    virtual ~SearchedRow() = default;
    virtual int64_t vocab() const = 0;
    // A tile's values, in `scratch` or in place.
    virtual const float* values(int64_t tile, float* scratch) const = 0;
    // The largest value of each group of `group_size` tokens of the row.
    virtual const std::vector<float>& group_max() const = 0;
    // out[i] = the mass of values[i]
    virtual void masses(const float* values, int64_t count, float* out) const = 0;
    virtual double total_mass() const = 0;
    // The value that has this mass, and the value whose mass is this share of that of `value`.
    virtual float value_of_mass(double mass) const = 0;
    virtual float scaled_value(float value, double share) const = 0;
};

struct Kept {
    float threshold;
    double mass;  // of the values >= threshold
};

class ThresholdSearch {
  public:
    void reserve(const Sizes& most) {
        reserve_all(most.blocks(), maxima_);
        reserve_all(2 * most.tokens() + tile_size, values_);
        reserve_all(most.tokens(), masses_, candidates_);
    }
    // Reads the groups of tokens that can hold kept values once, and `row.total_mass` at most once.
    Kept find(const SearchedRow& row, const FilterParameters& filter);

  private:
    float candidate_bound(const SearchedRow& row, const FilterParameters& filter, float min_p_value, double left_out);
    void gather(const SearchedRow& row, float bound);
    void keep_largest(int64_t count);
    void keep_mass(double needed);
    void keep_at_least(float value);
    double mass() const;
    std::vector<float> maxima_, values_, masses_;
    std::vector<std::pair<float, float>> candidates_;  // value and mass
};

}  // namespace specens
