// The arguments of one call.
#pragma once

#include "parts/report.h"
#include "parts/rule.h"

namespace specens {

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
          rule(call.rule, Taken::by_chains, draft.draft_len),
          report(call.logprobs, call.top_logprobs) {
        rule.check_sources(coins, draft, target.greedy());
    }
};

}  // namespace specens
