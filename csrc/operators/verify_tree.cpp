#include "operators/call.h"
#include "operators/results.h"
#include "verify_tree/verify.h"

namespace specens {
namespace {

void verify_tree_cpu(Results& results, const Members& member_logits, const TorchTensor& draft_tokens,
                     const std::vector<TorchTensor>& parents, int64_t max_levels, bool without_replacement,
                     int64_t drafter, const OptionalTensor& drafters, const OptionalTensors& draft_logits,
                     const Numbers& draft_sampling, bool process_drafts, const OptionalTensor& allowed,
                     const Numbers& ensemble, const Numbers& sampling, const Rows& rows, const Numbers& processing,
                     const Rows& processing_rows, const OptionalTensors& random, const Numbers& rule,
                     const Integers& logprobs) {
    require(parents.size() == 1 || parents.size() == 2, "parents: expected them, perhaps num_nodes");
    const OptionalTensor num_nodes = parents.size() == 2 ? OptionalTensor(parents[1]) : std::nullopt;
    Call call(member_logits, {allowed, ensemble, sampling, rows, processing, processing_rows});
    call.set_draft(draft_tokens, num_nodes, drafter, drafters, draft_logits, draft_sampling, rows, process_drafts);
    call.set_random(random);
    call.set_rule(rule);
    specens_tree tree = specens_tree_init();
    tree.target = &call.target;
    tree.draft = &call.draft;
    tree.random = &call.random;
    tree.rule = &call.rule;
    tree.parents = call.view(parents[0]);
    tree.max_levels = max_levels;
    tree.without_replacement = without_replacement ? 1 : 0;
    Call::set_report(tree, logprobs);
    const TreeCall arguments(tree);
    const specens_verdict verdict =
        add_verdict(results, arguments.report, arguments.target.batch, arguments.tree.levels + 1, true);
    results.finish(tree);
    const TorchThreads threads;
    verify_tree(arguments, verdict);
}

}  // namespace
}  // namespace specens

SPECENS_OPERATOR(verify_tree,

                 "Tensor[] member_logits, Tensor draft_tokens, Tensor[] parents, int max_levels, *, "
                 "bool without_replacement=False, " SPECENS_DRAFT_OPTIONS ", " SPECENS_TARGET_OPTIONS
                 ", Tensor[]? random=None, float[]? rule=None, int[]? logprobs=None",
                 "Tensor[]", make)
