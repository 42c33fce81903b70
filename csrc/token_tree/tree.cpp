#include "token_tree/tree.h"

#include <algorithm>
#include <cstring>

namespace specens {
namespace {

using Path = std::vector<int64_t>;

bool shorter_or_smaller(const Path& path, const Path& other) {
    return path.size() != other.size() ? path.size() < other.size() : path < other;
}

std::string text(const Path& path) {
    std::string written = "[";
    for (size_t level = 0; level < path.size(); ++level) {
        written.append(level > 0 ? ", " : "").append(std::to_string(path[level]));
    }
    return written + "]";
}

}  // namespace

TokenTree::TokenTree(std::vector<int64_t> parents, std::vector<int64_t> child_ranks)
    : parents_(std::move(parents)), child_ranks_(std::move(child_ranks)) {
    require_node_count("parents", num_nodes());
    const bool ranks_given = !child_ranks_.empty();
    if (ranks_given && child_ranks_.size() != parents_.size()) {
        fail("child_ranks", "one a node, " + std::to_string(parents_.size()), std::to_string(child_ranks_.size()));
    }
    link(ranks_given);
}

void TokenTree::link(bool ranks_given) {
    const size_t nodes = parents_.size();
    child_ranks_.resize(nodes);
    depth_.resize(nodes);
    first_child_.assign(nodes, -1);
    next_sibling_.assign(nodes, -1);
    std::vector<int64_t> last_child(nodes + 1, -1);  // of parent + 1
    int64_t inner_nodes = 0;
    for (int64_t node = 0; node < num_nodes(); ++node) {
        const int64_t parent = parents_[node];
        if (parent < -1 || parent >= node) {
            fail("parents[" + std::to_string(node) + "]", "-1 or an earlier node", std::to_string(parent));
        }
        depth_[node] = parent < 0 ? 0 : depth_[parent] + 1;
        num_levels_ = std::max<int64_t>(num_levels_, depth_[node] + 1);
        const int64_t previous = last_child[parent + 1];
        last_child[parent + 1] = node;
        if (previous >= 0) {
            next_sibling_[previous] = node;
        } else if (parent >= 0) {
            first_child_[parent] = node;
            ++inner_nodes;
        }
        const int64_t free_rank = previous < 0 ? 0 : child_ranks_[previous] + 1;
        if (!ranks_given) {
            child_ranks_[node] = free_rank;
        } else if (child_ranks_[node] < free_rank) {
            fail("child_ranks[" + std::to_string(node) + "]", "at least " + std::to_string(free_rank),
                 std::to_string(child_ranks_[node]));
        }
    }
    num_leaves_ = num_nodes() - inner_nodes;
}

TokenTree TokenTree::from_paths(std::vector<Path> paths) {
    require_node_count("paths", static_cast<int64_t>(paths.size()));
    std::sort(paths.begin(), paths.end(), shorter_or_smaller);
    std::vector<int64_t> parents, ranks;
    parents.reserve(paths.size());
    ranks.reserve(paths.size());
    for (size_t node = 0; node < paths.size(); ++node) {
        const Path& path = paths[node];
        if (path.empty() || *std::min_element(path.begin(), path.end()) < 0) {
            fail("paths", "paths of one or more child ranks >= 0", text(path));
        }
        if (node > 0 && path == paths[node - 1]) {
            fail("paths", "each path once", text(path) + " twice");
        }
        const Path prefix(path.begin(), path.end() - 1);
        const auto parent = std::lower_bound(paths.begin(), paths.begin() + node, prefix, shorter_or_smaller);
        if (!prefix.empty() && *parent != prefix) {
            fail("paths", "each prefix of a path among the paths", text(path) + " without " + text(prefix));
        }
        parents.push_back(prefix.empty() ? -1 : parent - paths.begin());
        ranks.push_back(path.back());
    }
    return TokenTree(std::move(parents), std::move(ranks));
}

TokenTree TokenTree::chains(int64_t count, int64_t length) {
    require_node_count("count", count);
    require_node_count("length", length);
    require_node_count("count * length", count * length);
    std::vector<int64_t> parents(count * length);
    for (int64_t node = 0; node < count * length; ++node) {
        parents[node] = node < count ? -1 : node - count;
    }
    return TokenTree(std::move(parents));
}

TokenTree TokenTree::branching(const std::vector<int64_t>& branches) {
    std::vector<int64_t> parents;
    int64_t level_begin = -1, level_size = 1;  // at first the root position alone
    for (const int64_t children : branches) {
        if (children < 1 || children > max_tree_nodes) {
            fail("branches", "1 to " + std::to_string(max_tree_nodes) + " children a level", std::to_string(children));
        }
        const int64_t next_begin = static_cast<int64_t>(parents.size());
        require_node_count("branches", next_begin + level_size * children);
        for (int64_t child = 0; child < level_size * children; ++child) {
            parents.push_back(level_begin + child / children);
        }
        level_begin = next_begin;
        level_size *= children;
    }
    return TokenTree(std::move(parents));
}

std::vector<int64_t> TokenTree::children(int64_t node) const {
    if (node < -1 || node >= num_nodes()) {
        fail("node", "-1 to " + std::to_string(num_nodes() - 1), std::to_string(node));
    }
    std::vector<int64_t> found;
    const int64_t first = node >= 0 ? first_child_[node] : (parents_.empty() ? -1 : 0);
    for (int64_t child = first; child >= 0; child = next_sibling_[child]) {
        found.push_back(child);
    }
    return found;
}

TokenTree TokenTree::with_root() const {
    std::vector<int64_t> parents = {-1}, ranks = {0};
    for (const int64_t parent : parents_) {
        parents.push_back(parent + 1);
    }
    ranks.insert(ranks.end(), child_ranks_.begin(), child_ranks_.end());
    return TokenTree(std::move(parents), std::move(ranks));
}

double TokenTree::expected_length(const std::vector<double>& acceptance) const {
    std::vector<double> path_probability(parents_.size());
    double sum = 0;
    for (size_t node = 0; node < parents_.size(); ++node) {
        const auto rank = static_cast<size_t>(child_ranks_[node]);
        const double own = rank < acceptance.size() ? acceptance[rank] : 0.0;
        path_probability[node] = parents_[node] < 0 ? own : own * path_probability[parents_[node]];
        sum += path_probability[node];
    }
    return sum;
}

void TokenTree::write_paths(int64_t* matrix, int64_t stride) const {
    for (int64_t leaf = 0; leaf < num_nodes(); ++leaf) {
        if (first_child_[leaf] >= 0) {
            continue;
        }
        for (int64_t node = leaf; node >= 0; node = parents_[node]) {
            matrix[depth_[node]] = node;
        }
        matrix += stride;
    }
}

void TokenTree::write_ancestor_bits(uint8_t* rows) const {
    const int64_t row_bytes = (num_nodes() + 7) / 8;
    for (int64_t node = 0; node < num_nodes(); ++node) {
        uint8_t* row = rows + node * row_bytes;
        if (parents_[node] < 0) {
            std::memset(row, 0, row_bytes);
        } else {
            std::memcpy(row, rows + parents_[node] * row_bytes, row_bytes);
        }
        row[node / 8] |= static_cast<uint8_t>(1u << (node % 8));
    }
}

}  // namespace specens
