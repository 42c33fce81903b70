// A tree that grows step by step from draft probabilities, and keeps its nodes of largest path probability.
#pragma once

#include <cstdint>
#include <vector>

#include "token_tree/tree.h"

namespace specens {

class TreeGrowth {
  public:
    struct Pruned {
        TokenTree tree;
        std::vector<int64_t> tokens, candidates;  // of the nodes
    };

    TreeGrowth(int64_t nodes, int64_t width, int64_t max_levels, bool newest_only);

    // What to expand next, the most probable first; -1 is the root position, and the whole frontier at first.
    const std::vector<int64_t>& frontier() const { return frontier_; }
    // tokens and probabilities: [frontier, columns].
    void add(const int64_t* tokens, const double* probabilities, int64_t columns);
    // The sum of the path probabilities of the nodes that pruning would keep.
    double expected_length() const;
    Pruned prune() const;

  private:
    struct Candidate {
        double path_probability;
        int64_t parent, token, rank, depth;
        bool expanded;
    };

    void keep_best();
    void choose_frontier(int64_t newest_begin);

    int64_t nodes_, width_, max_levels_;
    bool newest_only_;
    std::vector<Candidate> candidates_;
    std::vector<int64_t> best_;  // candidates within the budget, the most probable first
    std::vector<int64_t> frontier_ = {-1};
};

}  // namespace specens
