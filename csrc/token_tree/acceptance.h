#pragma once

#include <cstdint>
#include <vector>

#include "token_tree/tree.h"

namespace specens {

void require_acceptance(const std::vector<double>& acceptance);

// The tree with the largest TokenTree::expected_length among those of at most so many nodes and levels whose children
// have the ranks 0, 1, 2, ...: the dynamic programme of Chen et al., "Sequoia", NeurIPS 2024.
TokenTree best_tree_for_acceptance(std::vector<double> acceptance, int64_t nodes, int64_t max_levels);

}  // namespace specens
