// The arguments of one call, and where the results of a request go.
#pragma once

#include <vector>

#include "parts/draft_arguments.h"
#include "parts/report.h"
#include "verify_tree/links.h"

namespace specens {

enum class TreeRuleKind : int64_t { token = 0, traversal = 1, typical = 2, gumbel = 3 };

struct TreeRule {
    TreeRuleKind kind;
    double threshold, alpha;  // of typical acceptance

    explicit TreeRule(ArgumentReader& reader)
        : kind(reader.group().code(TreeRuleKind::token)), threshold(reader.number(0)), alpha(reader.number(0)) {}
};

// What one call hands to every request.
struct TreeCall {
    TargetArguments target;
    DraftArguments draft;
    TreeArgument tree;
    CoinView coins;
    TreeRule rule;
    ReportArguments report;

    explicit TreeCall(ArgumentReader reader)
        : target(reader),
          draft(target, reader, 1),
          tree(reader, target.batch),
          coins(reader, target.batch, draft.draft_len + 1),
          rule(reader),
          report(reader) {
        target.read_weights(reader);
        if (rule.kind == TreeRuleKind::gumbel) {
            require(coins.uniforms == nullptr && !draft.has_distributions(), "drafts and uniforms play no part");
        }
        require(reader.rest().empty(), "one weight a member is needed");
        require(target.steps == draft.draft_len + 1, "a row more than nodes is needed");
        require(tree.nodes() == draft.draft_len, "a parent for each node is needed");
        require(coins.any() || target.greedy(), "uniforms, or seeds and positions, are needed");
    }
};

// Where a request's results go.
struct TreeOutput {
    int64_t* tokens;     // [levels + 1]
    int64_t* path;       // [levels]
    ReportPlace report;  // nullptr where it is not asked for
};

}  // namespace specens
