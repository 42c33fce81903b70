// The draft tree of one request as links between nodes. Row 0 is the position after the committed text, row i + 1 that
// after node i.
#pragma once

#include <cstdint>
#include <vector>

#include "parts/arguments.h"
#include "token_tree/tree.h"

namespace specens {

struct TreeArgument {
    IntegerTable parents;  // [batch, nodes]
    int64_t levels;        // the most nodes of a path
    bool without_replacement;

    TreeArgument(const specens_tree& call, int64_t batch)
        : parents("parents", call.parents, {batch, any_size}),
          levels(call.max_levels),
          without_replacement(call.without_replacement != 0) {
        require(call.parents != nullptr, "parents: expected integers, got none");
        if (levels < 0 || levels > max_tree_nodes) {
            fail("max_levels", "0 to " + std::to_string(max_tree_nodes), std::to_string(levels));
        }
        if (nodes() > max_tree_nodes) {
            fail("parents", "at most " + std::to_string(max_tree_nodes) + " nodes", std::to_string(nodes()));
        }
    }
    int64_t nodes() const { return parents.columns; }
};

class TreeLinks {
  public:
    void reserve(const Sizes& most) {
        reserve_all(most.nodes + 1, parents_, depth_, first_child_, last_child_, next_sibling_);
    }
    // Nodes that are padding, or below such, have no place in it.
    void build(const TreeArgument& tree, int64_t request, int64_t num_nodes) {
        const int64_t nodes = tree.nodes();
        parents_.resize(nodes);
        depth_.assign(nodes + 1, 0);
        first_child_.assign(nodes + 1, -1);
        last_child_.assign(nodes + 1, -1);
        next_sibling_.assign(nodes, -1);
        for (int64_t node = 0; node < num_nodes; ++node) {
            const int64_t parent = tree.parents(request, node);
            parents_[node] = parent;
            const bool below = parent == -1 || (parent >= 0 && parent < node && depth_[parent + 1] > 0);
            if (!below || depth_[parent + 1] >= tree.levels) {
                continue;
            }
            depth_[node + 1] = depth_[parent + 1] + 1;
            int64_t& last = last_child_[parent + 1];
            (last < 0 ? first_child_[parent + 1] : next_sibling_[last]) = node;
            last = node;
        }
    }
    int64_t rows() const { return static_cast<int64_t>(depth_.size()); }
    // -1 where there is none.
    int64_t first_child(int64_t row) const { return first_child_[row]; }
    int64_t next_sibling(int64_t node) const { return next_sibling_[node]; }
    int64_t parent_row(int64_t node) const { return parents_[node] + 1; }
    int64_t depth(int64_t row) const { return depth_[row]; }  // 0 of the first row, and of padding

  private:
    std::vector<int64_t> parents_, depth_, first_child_, last_child_, next_sibling_;
};

}  // namespace specens
