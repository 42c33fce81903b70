// What changes the logits of a row after drafts, of a chain or of a tree.
#pragma once

#include <string>
#include <vector>

#include "parts/target_arguments.h"

namespace specens {

// Nodes stand after their parents, so that the way up from one ends.
inline void check_parents(const IntegerTable& parents, int64_t batch) {
    for (int64_t request = 0; parents.given && request < batch; ++request) {
        for (int64_t node = 0; node < parents.columns; ++node) {
            const int64_t parent = parents(request, node);
            if (parent < -2 || parent >= node) {
                fail("parents", "-2 to " + std::to_string(node - 1) + " of node " + std::to_string(node),
                     std::to_string(parent));
            }
        }
    }
}

class PathEdits {
  public:
    // drafts: tokens [batch, n]. parents: of a tree, likewise, -1: the root, less: padding; not given: of a chain.
    // nullptr: nothing is ever changed.
    const RowEdits* at(const TargetArguments& target, const IntegerTable& drafts, const IntegerTable& parents,
                       int64_t vocab, int64_t request, int64_t row) {
        if (!parents.given || !target.edited()) {
            return chain_.at(target, drafts, vocab, request, row);
        }
        path_.clear();
        for (int64_t node = row - 1; node >= 0 && parents(request, node) >= -1; node = parents(request, node)) {
            path_.push_back(drafts(request, node));
        }
        const auto depth = static_cast<int64_t>(path_.size());
        edits_.start(target.processing.of(request, vocab), request);
        edits_.enter_row(path_.data(), depth, depth, target.mask(request, row));
        return &edits_;
    }

  private:
    ChainEdits chain_;
    RowEdits edits_;
    std::vector<int64_t> path_;
};

}  // namespace specens
