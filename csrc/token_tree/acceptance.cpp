#include "token_tree/acceptance.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <string>

namespace specens {
namespace {

constexpr double impossible = -std::numeric_limits<double>::infinity();
constexpr double sum_tolerance = 1e-6;
constexpr double max_work = 1e10;  // additions: some ten seconds

// What the descendants of an accepted node are worth, by their number.
struct Descendants {
    std::vector<double> worth;             // [nodes + 1]
    std::vector<int64_t> children;         // [nodes + 1], of the best split
    std::vector<double> split_worth;       // [branches + 1, nodes + 1]: so many children share so many nodes
    std::vector<int64_t> last_child_size;  // [branches + 1, nodes + 1], in that split

    Descendants(int64_t branches, int64_t nodes)
        : worth(nodes + 1, impossible),
          children(nodes + 1, 0),
          split_worth((branches + 1) * (nodes + 1), impossible),
          last_child_size((branches + 1) * (nodes + 1), 0) {
        worth[0] = 0;
        split_worth[0] = 0;
    }
};

// `below` holds one level less, or is the same table where the number of levels is free: only smaller trees are read.
void fill(Descendants& own, const Descendants& below, const std::vector<double>& acceptance, int64_t nodes) {
    const auto branches = static_cast<int64_t>(acceptance.size());
    const int64_t row = nodes + 1;
    for (int64_t total = 1; total <= nodes; ++total) {
        for (int64_t count = 1; count <= std::min(branches, total); ++count) {
            double best = impossible;
            int64_t best_size = 0;
            for (int64_t size = 1; size <= total - count + 1; ++size) {
                const double worth = own.split_worth[(count - 1) * row + total - size] +
                                     acceptance[count - 1] * (1 + below.worth[size - 1]);
                if (worth > best) {
                    best = worth;
                    best_size = size;
                }
            }
            own.split_worth[count * row + total] = best;
            own.last_child_size[count * row + total] = best_size;
            if (best > own.worth[total]) {
                own.worth[total] = best;
                own.children[total] = count;
            }
        }
    }
}

struct Subtree {
    int64_t node, level, descendants;
};

// Walks the best splits in level order. tables[level]: of a node with so many levels below it.
TokenTree read_off(const std::vector<Descendants>& tables, int64_t nodes, bool free_levels) {
    const auto top = static_cast<int64_t>(tables.size()) - 1;
    const std::vector<double>& worth = tables[top].worth;
    const int64_t size = std::max_element(worth.begin(), worth.end()) - worth.begin();
    std::vector<int64_t> parents, ranks;
    std::vector<Subtree> queue = {{-1, top, size}};
    for (size_t index = 0; index < queue.size(); ++index) {
        const Subtree subtree = queue[index];
        const Descendants& table = tables[subtree.level];
        std::vector<int64_t> sizes(table.children[subtree.descendants]);
        int64_t left = subtree.descendants;
        for (auto count = static_cast<int64_t>(sizes.size()); count > 0; --count) {
            sizes[count - 1] = table.last_child_size[count * (nodes + 1) + left];
            left -= sizes[count - 1];
        }
        for (size_t rank = 0; rank < sizes.size(); ++rank) {
            const auto node = static_cast<int64_t>(parents.size());
            queue.push_back({node, free_levels ? subtree.level : subtree.level - 1, sizes[rank] - 1});
            parents.push_back(subtree.node);
            ranks.push_back(static_cast<int64_t>(rank));
        }
    }
    return TokenTree(std::move(parents), std::move(ranks));
}

}  // namespace

void require_acceptance(const std::vector<double>& acceptance) {
    for (const double probability : acceptance) {
        if (!(probability >= 0 && probability <= 1)) {
            fail("acceptance", "probabilities in [0, 1]", std::to_string(probability));
        }
    }
    const double sum = std::accumulate(acceptance.begin(), acceptance.end(), 0.0);
    if (sum > 1 + sum_tolerance) {
        fail("acceptance", "a sum of at most 1, since at most one child of a node is accepted", std::to_string(sum));
    }
}

TokenTree best_tree_for_acceptance(std::vector<double> acceptance, int64_t nodes, int64_t max_levels) {
    require_acceptance(acceptance);
    require_node_count("nodes", nodes);
    if (max_levels < 1) {
        fail("max_levels", "None or an integer >= 1", std::to_string(max_levels));
    }
    while (!acceptance.empty() && (acceptance.back() == 0 || static_cast<int64_t>(acceptance.size()) > nodes)) {
        acceptance.pop_back();
    }
    const auto branches = static_cast<int64_t>(acceptance.size());
    const bool free_levels = max_levels >= nodes;
    const double work = 0.5 * (free_levels ? 1 : max_levels) * branches * nodes * nodes;
    if (work > max_work) {
        fail("nodes", "nodes^2 * child ranks * levels of at most 2e10", std::to_string(2 * work));
    }
    std::vector<Descendants> tables(1, Descendants(branches, nodes));
    if (free_levels) {
        fill(tables[0], tables[0], acceptance, nodes);
    }
    for (int64_t level = 1; level <= max_levels && !free_levels; ++level) {
        tables.emplace_back(branches, nodes);
        fill(tables[level], tables[level - 1], acceptance, nodes);
        if (tables[level].worth == tables[level - 1].worth) {
            break;  // more levels change nothing
        }
    }
    return read_off(tables, nodes, free_levels);
}

}  // namespace specens
