#include "token_tree/growth.h"

#include <algorithm>

namespace specens {

TreeGrowth::TreeGrowth(int64_t nodes, int64_t width, int64_t max_levels, bool newest_only)
    : nodes_(nodes), width_(width), max_levels_(max_levels), newest_only_(newest_only) {
    require_node_count("nodes", nodes);
    if (width < 1) {
        fail("width", "an integer >= 1", std::to_string(width));
    }
    if (max_levels < 1) {
        fail("max_levels", "None or an integer >= 1", std::to_string(max_levels));
    }
}

void TreeGrowth::add(const int64_t* tokens, const double* probabilities, int64_t columns) {
    const auto rows = static_cast<int64_t>(frontier_.size());
    for (int64_t index = 0; index < rows * columns; ++index) {
        if (!(probabilities[index] >= 0 && probabilities[index] <= 1)) {
            fail("probabilities", "numbers in [0, 1]", std::to_string(probabilities[index]));
        }
    }
    const auto newest_begin = static_cast<int64_t>(candidates_.size());
    for (int64_t row = 0; row < rows; ++row) {
        const int64_t parent = frontier_[row];
        const double parent_probability = parent < 0 ? 1.0 : candidates_[parent].path_probability;
        const int64_t depth = parent < 0 ? 0 : candidates_[parent].depth + 1;
        if (parent >= 0) {
            candidates_[parent].expanded = true;
        }
        for (int64_t column = 0; column < columns; ++column) {
            const int64_t index = row * columns + column;
            const double path_probability = parent_probability * probabilities[index];
            if (path_probability > 0) {
                best_.push_back(static_cast<int64_t>(candidates_.size()));
            }
            candidates_.push_back({path_probability, parent, tokens[index], column, depth, false});
        }
    }
    keep_best();
    choose_frontier(newest_begin);
}

// No child is more probable than its parent, and it comes later: what falls out of the budget never returns, nor does
// anything below it, and what stays is a tree.
void TreeGrowth::keep_best() {
    const auto precedes = [this](int64_t first, int64_t second) {
        const double difference = candidates_[first].path_probability - candidates_[second].path_probability;
        return difference != 0 ? difference > 0 : first < second;
    };
    const auto kept = std::min<size_t>(best_.size(), static_cast<size_t>(nodes_));
    std::partial_sort(best_.begin(), best_.begin() + kept, best_.end(), precedes);
    best_.resize(kept);
}

void TreeGrowth::choose_frontier(int64_t newest_begin) {
    frontier_.clear();
    for (const int64_t candidate : best_) {
        const bool open = newest_only_ ? candidate >= newest_begin : !candidates_[candidate].expanded;
        if (open && candidates_[candidate].depth + 1 < max_levels_) {
            frontier_.push_back(candidate);
        }
        if (static_cast<int64_t>(frontier_.size()) == width_) {
            return;
        }
    }
}

double TreeGrowth::expected_length() const {
    double sum = 0;
    for (const int64_t candidate : best_) {
        sum += candidates_[candidate].path_probability;
    }
    return sum;
}

TreeGrowth::Pruned TreeGrowth::prune() const {
    std::vector<int64_t> kept = best_;
    std::sort(kept.begin(), kept.end());
    std::vector<int64_t> parents, ranks, tokens;
    for (const int64_t candidate : kept) {
        const Candidate& node = candidates_[candidate];
        const auto parent = std::lower_bound(kept.begin(), kept.end(), node.parent);
        parents.push_back(node.parent < 0 ? -1 : parent - kept.begin());
        ranks.push_back(node.rank);
        tokens.push_back(node.token);
    }
    return {TokenTree(std::move(parents), std::move(ranks)), std::move(tokens), std::move(kept)};
}

}  // namespace specens
