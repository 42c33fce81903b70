// The arguments of one call.
#pragma once

#include <vector>

#include "parts/draft_arguments.h"
#include "parts/report.h"
#include "verify_chain/decision_tree.h"

namespace specens {

enum class RuleKind : int64_t {
    token = 0,
    block = 1,
    typical = 2,
    synthetic = 3,
    threshold = 4,
    replacement = 5,
    decision_tree = 6,
    gumbel = 7
};

struct RuleArguments {
    RuleKind kind;
    double threshold;           // of typical and threshold acceptance; a replacement's alpha
    double alpha;               // of typical acceptance; a replacement's beta
    std::vector<double> rates;  // of synthetic acceptance, [draft_len]
    DecisionTree tree;

    explicit RuleArguments(ArgumentReader& reader)
        : kind(reader.group().code(RuleKind::token)), threshold(reader.number(0)), alpha(reader.number(0)) {}
    // The numbers behind the weights.
    void read_table(const ArgumentReader& reader, int64_t draft_len) {
        if (kind == RuleKind::decision_tree) {
            tree = DecisionTree(reader.rest());
            return;
        }
        rates = reader.rest();
        require(rates.size() == (kind == RuleKind::synthetic ? static_cast<size_t>(draft_len) : 0), "rates or weights");
    }
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
};

// What one call hands to every request.
struct ChainArguments {
    TargetArguments target;
    DraftArguments draft;
    CoinView coins;
    RuleArguments rule;
    ReportArguments report;

    explicit ChainArguments(ArgumentReader reader)
        : target(reader),
          draft(target, reader),
          coins(reader, target.batch, draft.draft_len + 1),
          rule(reader),
          report(reader) {
        target.read_weights(reader);
        rule.read_table(reader, draft.draft_len);
        if (rule.kind == RuleKind::gumbel) {
            require(coins.uniforms == nullptr && !draft.has_distributions(), "drafts and uniforms play no part");
        }
        const bool coinless = rule.compares() || (target.greedy() && rule.kind != RuleKind::synthetic);
        require(coins.any() || coinless, "uniforms, or seeds and positions, are needed");
    }
};

}  // namespace specens
