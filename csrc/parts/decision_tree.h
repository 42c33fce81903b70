// A decision tree on two probabilities.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "parts/require.h"

namespace specens {

class DecisionTree {
  public:
    DecisionTree() = default;
    // Of each node: feature, threshold, left, right, replace; a leaf has feature -1.
    explicit DecisionTree(std::span<const double> table) {
        const size_t count = table.size() / node_fields;
        require(count > 0 && table.size() % node_fields == 0,
                "rule: expected a decision tree of five numbers a node, got another table");
        nodes_.reserve(count);
        for (size_t index = 0; index < count; ++index) {
            const double* own = table.data() + index * node_fields;
            const bool leaf = own[0] == -1;
            require(leaf || own[0] == 0 || own[0] == 1,
                    "rule: expected a decision tree that looks at two probabilities, got another feature");
            const auto last = static_cast<double>(count - 1);
            const auto least = static_cast<double>(index + 1);
            require(leaf || (own[2] >= least && own[2] <= last && own[3] >= least && own[3] <= last),
                    "rule: expected the children of a decision tree's node after it, got others");
            nodes_.push_back({leaf, own[0] == 1, own[4] != 0, leaf ? 0 : static_cast<size_t>(own[2]),
                              leaf ? 0 : static_cast<size_t>(own[3]), own[1]});
        }
    }
    bool replaces(double draft, double assistant) const {
        size_t place = 0;
        while (!nodes_[place].leaf) {
            const Node& node = nodes_[place];
            place = (node.of_assistant ? assistant : draft) <= node.threshold ? node.left : node.right;
        }
        return nodes_[place].replace;
    }

  private:
    static constexpr size_t node_fields = 5;
    struct Node {
        bool leaf, of_assistant, replace;
        size_t left, right;
        double threshold;  // probabilities up to it go left
    };
    std::vector<Node> nodes_;
};

}  // namespace specens
