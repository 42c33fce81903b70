#include "parts/filters.h"

namespace specens {
namespace {

constexpr float lowest = std::numeric_limits<float>::lowest();  // every value but -inf

bool larger(const std::pair<float, float>& a, const std::pair<float, float>& b) { return a.first > b.first; }

// The count-th largest of `values`, which it reorders.
float nth_largest(std::vector<float>& values, int64_t count) {
    std::nth_element(values.begin(), values.begin() + (count - 1), values.end(), std::greater<>());
    return values[count - 1];
}

}  // namespace

Kept ThresholdSearch::find(const SearchedRow& row, const FilterParameters& filter) {
    const float max = *std::max_element(row.group_max().begin(), row.group_max().end());
    const float min_p_value = filter.min_p > 0 ? std::max(row.scaled_value(max, filter.min_p), lowest) : lowest;
    // whether top-p acts on the whole row, not on what an earlier filter left
    const bool whole_row = filter.top_p < 1 && filter.top_k == 0 && !(filter.min_p_first && filter.min_p > 0);
    const double row_mass = whole_row ? row.total_mass() : 0;
    gather(row, std::min(max, candidate_bound(row, filter, min_p_value, (1 - filter.top_p) * row_mass)));
    if (filter.min_p_first) {
        keep_at_least(min_p_value);
    }
    if (filter.top_k > 0) {
        keep_largest(filter.top_k);
    }
    if (filter.top_p < 1) {
        keep_mass(filter.top_p * (whole_row ? row_mass : mass()));
    }
    if (!filter.min_p_first) {
        keep_at_least(min_p_value);
    }
    return {std::min_element(candidates_.begin(), candidates_.end())->first, mass()};
}

// No kept value lies below it, and no filter needs to know a value below it. left_out: the mass of the row that top-p
// leaves out, 0 where it does not act on the whole row.
float ThresholdSearch::candidate_bound(const SearchedRow& row, const FilterParameters& filter, float min_p_value,
                                       double left_out) {
    float bound = lowest;
    if (filter.min_p_first || filter.top_p >= 1) {
        bound = min_p_value;
    }
    if (filter.top_k > 0 && filter.top_k <= static_cast<int64_t>(row.group_max().size())) {
        // so many groups have a value at least as large
        maxima_ = row.group_max();
        bound = std::max(bound, nth_largest(maxima_, filter.top_k));
    } else if (left_out > 0) {
        // all values below it together have less than the mass that is left out
        bound = std::max(bound, row.value_of_mass(left_out / static_cast<double>(row.vocab())));
    }
    return bound;
}

void ThresholdSearch::gather(const SearchedRow& row, float bound) {
    const std::vector<float>& group_max = row.group_max();
    alignas(64) float scratch[tile_size];
    int64_t found = 0;
    for (int64_t first = 0; first < row.vocab(); first += tile_size) {
        const int64_t width = std::min(tile_size, row.vocab() - first);
        const float* values = nullptr;
        for (int64_t group = 0; group * group_size < width; ++group) {
            if (group_max[(first + group * group_size) / group_size] < bound) {
                continue;
            }
            values = values != nullptr ? values : row.values(first / tile_size, scratch);
            const int64_t count = std::min(group_size, width - group * group_size);
            if (static_cast<int64_t>(values_.size()) < found + count + 16) {
                values_.resize(2 * found + tile_size);
            }
            found += row_kernels().gather(values + group * group_size, count, bound, values_.data() + found);
        }
    }
    masses_.resize(found);
    row.masses(values_.data(), found, masses_.data());
    candidates_.clear();
    for (int64_t index = 0; index < found; ++index) {
        candidates_.emplace_back(values_[index], masses_[index]);
    }
}

void ThresholdSearch::keep_at_least(float value) {
    std::erase_if(candidates_, [value](const auto& candidate) { return candidate.first < value; });
}

// The `count` largest and all that tie with the last of them.
void ThresholdSearch::keep_largest(int64_t count) {
    if (count < static_cast<int64_t>(candidates_.size())) {
        std::nth_element(candidates_.begin(), candidates_.begin() + (count - 1), candidates_.end(), larger);
        keep_at_least(candidates_[count - 1].first);
    }
}

// The largest that together have the needed mass, and all that tie with the last of them. Each round looks at half of
// the candidates of the one before.
void ThresholdSearch::keep_mass(double needed) {
    auto begin = candidates_.begin();
    auto end = candidates_.end();
    while (end - begin > 1) {
        const auto middle = begin + (end - begin) / 2;
        std::nth_element(begin, middle, end, larger);
        double upper = 0;
        for (auto candidate = begin; candidate != middle; ++candidate) {
            upper += candidate->second;
        }
        if (upper >= needed) {
            end = middle;
        } else {
            needed -= upper;
            begin = middle;
        }
    }
    keep_at_least(begin->first);
}

double ThresholdSearch::mass() const {
    double total = 0;
    for (const auto& candidate : candidates_) {
        total += candidate.second;
    }
    return total;
}

}  // namespace specens
