// The arguments of one call, and where the results of a request go.
#pragma once

#include "parts/report.h"
#include "parts/rule.h"
#include "verify_tree/links.h"

namespace specens {

// What one call hands to every request.
struct TreeCall {
    TargetArguments target;
    DraftArguments draft;
    TreeArgument tree;
    RandomNumbers random;
    RuleArguments rule;
    ReportArguments report;

    explicit TreeCall(const specens_tree& call)
        : target(call.target),
          draft(target, call.draft, 1),
          tree(call, target.batch),
          random(call.random, target.batch, draft.draft_len + 1),
          rule(call.rule, Taken::by_trees, draft.draft_len),
          report(call.logprobs, call.top_logprobs) {
        require(!target.packed(), "row_offsets: expected none, as trees are not packed");
        require(target.steps == draft.draft_len + 1, "member_logits: expected a row more than nodes, got others");
        require(tree.nodes() == draft.draft_len, "parents: expected one for each of draft_tokens, got others");
        require(rule.kind != RuleKind::k_seq || !tree.without_replacement,
                "siblings: expected 'with_replacement' under the rule 'k_seq', got 'without_replacement'");
        rule.check_sources(random, draft, target.greedy());
    }
};

// Where a request's results go.
struct TreeOutput {
    int64_t* tokens;       // [levels + 1]
    int64_t* path;         // [levels]
    ReportBuffers report;  // nullptr where it is not asked for
};

}  // namespace specens
