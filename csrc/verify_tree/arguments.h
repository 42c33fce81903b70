// The arguments of one call, and where the results of a request go.
#pragma once

#include "parts/draft_arguments.h"
#include "parts/report.h"
#include "verify_tree/links.h"

namespace specens {

enum class TreeRuleKind : int32_t {
    token = SPECENS_RULE_TOKEN,
    traversal = SPECENS_RULE_TRAVERSAL,
    typical = SPECENS_RULE_TYPICAL,
    gumbel = SPECENS_RULE_GUMBEL
};

struct TreeRule {
    TreeRuleKind kind;
    double threshold, alpha;  // of typical acceptance

    explicit TreeRule(const specens_rule* given) : TreeRule(adopted("rule", given, specens_rule_init())) {}

  private:
    explicit TreeRule(const specens_rule& own)
        : kind(static_cast<TreeRuleKind>(own.kind)), threshold(own.threshold), alpha(own.alpha) {
        if (kind != TreeRuleKind::token && kind != TreeRuleKind::traversal && kind != TreeRuleKind::typical &&
            kind != TreeRuleKind::gumbel) {
            fail("rule", "one for trees: token, traversal, typical or gumbel", "the code " + std::to_string(own.kind));
        }
        require(own.table == nullptr || own.table_size == 0, "rule: expected no table, got one");
    }
};

// What one call hands to every request.
struct TreeCall {
    TargetArguments target;
    DraftArguments draft;
    TreeArgument tree;
    CoinView coins;
    TreeRule rule;
    ReportArguments report;

    explicit TreeCall(const specens_tree& call)
        : target(call.target),
          draft(target, call.draft, 1),
          tree(call, target.batch),
          coins(call.random, target.batch, draft.draft_len + 1),
          rule(call.rule),
          report(call.logprobs, call.top_logprobs) {
        if (rule.kind == TreeRuleKind::gumbel) {
            require(coins.uniforms == nullptr && !draft.has_distributions(),
                    "rule: expected seeds and positions, and no drafter, draft_logits or uniforms, with gumbel");
        }
        require(!target.packed(), "row_offsets: expected none, as trees are not packed");
        require(target.steps == draft.draft_len + 1, "member_logits: expected a row more than nodes, got others");
        require(tree.nodes() == draft.draft_len, "parents: expected one for each of draft_tokens, got others");
        require(coins.any() || target.greedy(), "random: expected uniforms, or seeds and positions, got neither");
    }
};

// Where a request's results go.
struct TreeOutput {
    int64_t* tokens;     // [levels + 1]
    int64_t* path;       // [levels]
    ReportPlace report;  // nullptr where it is not asked for
};

}  // namespace specens
