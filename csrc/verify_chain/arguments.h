// The arguments of one call.
#pragma once

#include "parts/report.h"
#include "parts/rule.h"

namespace specens {

// What one call hands to every request.
struct ChainArguments {
    TargetArguments target;
    DraftArguments draft;
    RandomNumbers random;
    RuleArguments rule;
    ReportArguments report;

    explicit ChainArguments(const specens_chain& call)
        : target(call.target),
          draft(target, call.draft),
          random(call.random, target.batch, draft.draft_len + 1),
          rule(call.rule, Taken::by_chains, draft.draft_len),
          report(call.logprobs, call.top_logprobs) {
        rule.check_sources(random, draft, target.greedy());
    }
};

}  // namespace specens
