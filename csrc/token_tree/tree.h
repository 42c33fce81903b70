// A draft tree on the host. Nodes are numbered so that a parent comes before its children; parent -1 is the last
// token of the committed context.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "parts/require.h"

namespace specens {

constexpr int64_t max_tree_nodes = 16384;

inline void require_node_count(const char* argument, int64_t nodes) {
    if (nodes < 0 || nodes > max_tree_nodes) {
        fail(argument, "0 to " + std::to_string(max_tree_nodes) + " nodes", std::to_string(nodes));
    }
}

class TokenTree {
  public:
    // Without child ranks, the children of a node are numbered in their order.
    explicit TokenTree(std::vector<int64_t> parents, std::vector<int64_t> child_ranks = {});

    // From the paths of child ranks that lead to the nodes.
    static TokenTree from_paths(std::vector<std::vector<int64_t>> paths);
    static TokenTree chains(int64_t count, int64_t length);
    // branches[level]: children of each node of the level above.
    static TokenTree branching(const std::vector<int64_t>& branches);

    int64_t num_nodes() const { return static_cast<int64_t>(parents_.size()); }
    int64_t num_leaves() const { return num_leaves_; }
    int64_t num_levels() const { return num_levels_; }
    const std::vector<int64_t>& parents() const { return parents_; }
    const std::vector<int64_t>& child_ranks() const { return child_ranks_; }
    const std::vector<int32_t>& depth() const { return depth_; }
    const std::vector<int64_t>& first_child() const { return first_child_; }
    const std::vector<int64_t>& next_sibling() const { return next_sibling_; }

    std::vector<int64_t> children(int64_t node) const;
    TokenTree with_root() const;
    double expected_length(const std::vector<double>& acceptance) const;
    // The path of the i-th leaf at matrix[i * stride], one node a level; what lies after a path is left as it is.
    void write_paths(int64_t* matrix, int64_t stride) const;
    // Little-endian bits, ceil(nodes / 8) bytes a node: the node and its ancestors.
    void write_ancestor_bits(uint8_t* rows) const;

    bool operator==(const TokenTree& other) const {
        return parents_ == other.parents_ && child_ranks_ == other.child_ranks_;
    }

  private:
    void link(bool ranks_given);

    std::vector<int64_t> parents_, child_ranks_, first_child_, next_sibling_;
    std::vector<int32_t> depth_;
    int64_t num_leaves_ = 0, num_levels_ = 0;
};

}  // namespace specens
