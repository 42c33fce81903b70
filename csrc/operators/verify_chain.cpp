#include "verify_chain/verify.h"

#include "operators/call.h"
#include "operators/results.h"

namespace specens {
namespace {

void verify_chain_cpu(Results& results, const Members& member_logits, const TorchTensor& draft_tokens,
                      const OptionalTensor& row_offsets, const OptionalTensor& draft_lens, int64_t max_draft_len,
                      int64_t drafter, const OptionalTensor& drafters, const OptionalTensors& draft_logits,
                      const Numbers& draft_sampling, bool process_drafts, const OptionalTensor& allowed,
                      const Numbers& ensemble, const Numbers& sampling, const Rows& rows, const Numbers& processing,
                      const Rows& processing_rows, const OptionalTensors& random, const Numbers& rule,
                      const Integers& logprobs) {
    Call call(member_logits, {allowed, ensemble, sampling, rows, processing, processing_rows});
    call.target.row_offsets = call.view(row_offsets);
    call.set_draft(draft_tokens, draft_lens, drafter, drafters, draft_logits, draft_sampling, rows, process_drafts);
    call.draft.max_draft_len = max_draft_len;
    call.set_random(random);
    call.set_rule(rule);
    specens_chain chain = specens_chain_init();
    chain.target = &call.target;
    chain.draft = &call.draft;
    chain.random = &call.random;
    chain.rule = &call.rule;
    Call::set_report(chain, logprobs);
    const ChainArguments arguments(chain);
    const specens_verdict verdict =
        add_verdict(results, arguments.report, arguments.target.batch, arguments.draft.draft_len + 1, false);
    results.finish(chain);
    const TorchThreads threads;
    verify_chain(arguments, verdict);
}

}  // namespace
}  // namespace specens

SPECENS_OPERATOR(verify_chain,

                 "Tensor[] member_logits, Tensor draft_tokens, *, Tensor? row_offsets=None, Tensor? draft_lens=None, "
                 "int max_draft_len=-1, " SPECENS_DRAFT_OPTIONS ", " SPECENS_TARGET_OPTIONS
                 ", Tensor[]? random=None, float[]? rule=None, int[]? logprobs=None",
                 "Tensor[]", make)
