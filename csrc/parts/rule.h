// The acceptance rule of a call: what each rule takes and reads, its settings, and the tests that look at one draft.
// `RuleKind` of the Python package says the same of all rules; tests/test_shared_values.py holds the two equal.
#pragma once

#include <array>
#include <cmath>
#include <span>

#include "parts/decision_tree.h"
#include "parts/draft_arguments.h"
#include "parts/target_row.h"

namespace specens {

constexpr double empty_residual_mass = 0x1p-20;  // what float rounding can leave of a residual that is nothing

enum class RuleKind : int32_t {
    token = SPECENS_RULE_TOKEN,
    block = SPECENS_RULE_BLOCK,
    typical = SPECENS_RULE_TYPICAL,
    synthetic = SPECENS_RULE_SYNTHETIC,
    threshold = SPECENS_RULE_THRESHOLD,
    replacement = SPECENS_RULE_REPLACEMENT,
    decision_tree = SPECENS_RULE_DECISION_TREE,
    gumbel = SPECENS_RULE_GUMBEL,
    traversal = SPECENS_RULE_TRAVERSAL,
    k_seq = SPECENS_RULE_K_SEQ
};

enum class Taken { by_chains, by_trees, by_both };
// Where the token after a rejected draft comes from.
enum class Next { residual, target, most_likely, best_score };

struct RuleTraits {
    RuleKind kind;
    Taken taken;
    Next next;
};

constexpr std::array rules{
    RuleTraits{RuleKind::token, Taken::by_both, Next::residual},
    RuleTraits{RuleKind::block, Taken::by_chains, Next::residual},
    RuleTraits{RuleKind::typical, Taken::by_both, Next::target},
    RuleTraits{RuleKind::synthetic, Taken::by_chains, Next::target},
    RuleTraits{RuleKind::threshold, Taken::by_chains, Next::target},
    RuleTraits{RuleKind::replacement, Taken::by_chains, Next::most_likely},
    RuleTraits{RuleKind::decision_tree, Taken::by_chains, Next::most_likely},
    RuleTraits{RuleKind::gumbel, Taken::by_both, Next::best_score},
    RuleTraits{RuleKind::traversal, Taken::by_trees, Next::residual},
    RuleTraits{RuleKind::k_seq, Taken::by_trees, Next::residual},
};

// A table instead of settings: of rates, or of a decision tree's nodes.
constexpr bool has_table(RuleKind kind) { return kind == RuleKind::synthetic || kind == RuleKind::decision_tree; }

struct RuleArguments {
    RuleKind kind;
    Next next;
    double threshold;               // of typical and threshold acceptance; a replacement's alpha
    double alpha;                   // of typical acceptance; a replacement's beta
    std::span<const double> rates;  // of synthetic acceptance, [draft_len]
    DecisionTree tree;

    // operation: Taken::by_chains or by_trees.
    RuleArguments(const specens_rule* given, Taken operation, int64_t draft_len) {
        const specens_rule own = adopted("rule", given, specens_rule_init());
        const auto* traits = std::find_if(rules.begin(), rules.end(), [&](const RuleTraits& rule) {
            return static_cast<int32_t>(rule.kind) == own.kind &&
                   (rule.taken == operation || rule.taken == Taken::by_both);
        });
        if (traits == rules.end()) {
            fail("rule", operation == Taken::by_trees ? "one for trees" : "one for chains",
                 "the code " + std::to_string(own.kind));
        }
        kind = traits->kind;
        next = traits->next;
        threshold = own.threshold;
        alpha = own.alpha;
        const std::span<const double> table(own.table, own.table != nullptr ? static_cast<size_t>(own.table_size) : 0);
        const size_t needed = kind == RuleKind::synthetic ? static_cast<size_t>(draft_len) : 0;
        if (kind == RuleKind::decision_tree) {
            tree = DecisionTree(table);
        } else if (table.size() != needed) {
            fail("rule", "a table of " + std::to_string(needed) + " numbers", std::to_string(table.size()));
        }
        rates = table;
    }
    // Whether a rejected draft is followed by a token from the residual.
    bool subtracts() const { return next == Next::residual; }
    // Whether the draft is weighed against the target's most likely token, which takes its place; nothing is drawn.
    bool compares() const { return next == Next::most_likely; }
    bool by_scores() const { return next == Next::best_score; }
    bool reads_draft() const { return subtracts() || compares(); }
    // Whether greedy requests are tested as others are, by random numbers.
    bool tests_greedy() const { return kind == RuleKind::synthetic; }

    // Throws where a source of random numbers is missing, or what plays no part is given.
    void check_sources(const RandomNumbers& random, const DraftArguments& draft, bool greedy) const {
        require(!by_scores() || (random.uniforms == nullptr && !draft.has_distributions()),
                "rule: expected seeds and positions, and no drafter, draft_logits or uniforms, with gumbel");
        require(random.any() || compares() || (greedy && !tests_greedy()),
                "random: expected uniforms, or seeds and positions, got neither");
    }
    // What the target probability of a typical token exceeds.
    double typical_limit(const TargetRow& target) const {
        return std::min(threshold, alpha * std::exp(-target.entropy()));
    }
    // Of rules whose next token is the target's: whether a draft of this target probability is accepted.
    bool accepts(double probability, const TargetRow& target) const {
        return kind == RuleKind::typical ? probability > typical_limit(target) : probability >= threshold;
    }
    // Of rules that compare: by the draft token's draft probability and the target probability of the other token.
    bool replaces(double draft, double assistant) const {
        return kind == RuleKind::decision_tree ? tree.replaces(draft, assistant)
                                               : draft < threshold && assistant > alpha * draft;
    }
};

}  // namespace specens
