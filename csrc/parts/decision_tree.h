// A decision tree on two probabilities.
#pragma once

#include <cstdint>
#include <span>

#include "parts/require.h"

namespace specens {

class DecisionTree {
  public:
    DecisionTree() = default;
    // Of each node: feature, threshold, left, right, replace; a leaf has feature -1. The table outlives it.
    explicit DecisionTree(std::span<const double> table) : table_(table) {
        const size_t count = table.size() / node_fields;
        require(count > 0 && table.size() % node_fields == 0,
                "rule: expected a decision tree of five numbers a node, got another table");
        for (size_t index = 0; index < count; ++index) {
            const double* own = node(index);
            const bool leaf = own[0] == -1;
            require(leaf || own[0] == 0 || own[0] == 1,
                    "rule: expected a decision tree that looks at two probabilities, got another feature");
            const auto last = static_cast<double>(count - 1);
            const auto least = static_cast<double>(index + 1);
            require(leaf || (own[2] >= least && own[2] <= last && own[3] >= least && own[3] <= last),
                    "rule: expected the children of a decision tree's node after it, got others");
        }
    }
    bool replaces(double draft, double assistant) const {
        const double* own = node(0);
        while (own[0] != -1) {  // probabilities up to the threshold go left
            own = node(static_cast<size_t>((own[0] == 1 ? assistant : draft) <= own[1] ? own[2] : own[3]));
        }
        return own[4] != 0;
    }

  private:
    static constexpr size_t node_fields = 5;

    const double* node(size_t index) const { return table_.data() + index * node_fields; }

    std::span<const double> table_;
};

}  // namespace specens
