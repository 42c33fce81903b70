// The arguments of one call.
#pragma once

#include <span>

#include "parts/draft_arguments.h"
#include "parts/report.h"
#include "verify_chain/decision_tree.h"

namespace specens {

// Who tests: chains and trees have one numbering.
enum class RuleKind : int32_t {
    token = SPECENS_RULE_TOKEN,
    block = SPECENS_RULE_BLOCK,
    typical = SPECENS_RULE_TYPICAL,
    synthetic = SPECENS_RULE_SYNTHETIC,
    threshold = SPECENS_RULE_THRESHOLD,
    replacement = SPECENS_RULE_REPLACEMENT,
    decision_tree = SPECENS_RULE_DECISION_TREE,
    gumbel = SPECENS_RULE_GUMBEL
};

struct RuleArguments {
    RuleKind kind;
    double threshold;               // of typical and threshold acceptance; a replacement's alpha
    double alpha;                   // of typical acceptance; a replacement's beta
    std::span<const double> rates;  // of synthetic acceptance, [draft_len]
    DecisionTree tree;

    RuleArguments(const specens_rule* given, int64_t draft_len)
        : RuleArguments(adopted("rule", given, specens_rule_init()), draft_len) {}
    // Whether a rejected draft is followed by a token from the residual, else by one from the target.
    bool subtracts() const { return kind == RuleKind::token || kind == RuleKind::block; }
    // Whether the draft is weighed against the target's most likely token, which takes its place; without coins.
    bool compares() const { return kind == RuleKind::replacement || kind == RuleKind::decision_tree; }
    bool reads_draft() const { return subtracts() || compares(); }
    // By the draft token's draft probability and the target probability of the other token.
    bool replaces(double draft, double assistant) const {
        return kind == RuleKind::decision_tree ? tree.replaces(draft, assistant)
                                               : draft < threshold && assistant > alpha * draft;
    }

  private:
    RuleArguments(const specens_rule& own, int64_t draft_len)
        : kind(static_cast<RuleKind>(own.kind)), threshold(own.threshold), alpha(own.alpha) {
        if (own.kind < SPECENS_RULE_TOKEN || own.kind > SPECENS_RULE_GUMBEL) {
            fail("rule", "one for chains", "the code " + std::to_string(own.kind));
        }
        const std::span<const double> table(own.table, own.table != nullptr ? static_cast<size_t>(own.table_size) : 0);
        const size_t needed = kind == RuleKind::synthetic ? static_cast<size_t>(draft_len) : 0;
        if (kind == RuleKind::decision_tree) {
            tree = DecisionTree(table);
        } else if (table.size() != needed) {
            fail("rule", "a table of " + std::to_string(needed) + " numbers", std::to_string(table.size()));
        }
        rates = table;
    }
};

// What one call hands to every request.
struct ChainArguments {
    TargetArguments target;
    DraftArguments draft;
    CoinView coins;
    RuleArguments rule;
    ReportArguments report;

    explicit ChainArguments(const specens_chain& call)
        : target(call.target),
          draft(target, call.draft),
          coins(call.random, target.batch, draft.draft_len + 1),
          rule(call.rule, draft.draft_len),
          report(call.logprobs, call.top_logprobs) {
        if (rule.kind == RuleKind::gumbel) {
            require(coins.uniforms == nullptr && !draft.has_distributions(),
                    "rule: expected seeds and positions, and no drafter, draft_logits or uniforms, with gumbel");
        }
        const bool coinless = rule.compares() || (target.greedy() && rule.kind != RuleKind::synthetic);
        require(coins.any() || coinless, "random: expected uniforms, or seeds and positions, got neither");
    }
};

}  // namespace specens
