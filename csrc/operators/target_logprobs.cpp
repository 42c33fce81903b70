#include "operators/call.h"
#include "operators/results.h"
#include "target_logprobs/score.h"

namespace specens {
namespace {

void target_logprobs_cpu(Results& results, const Members& member_logits, const OptionalTensor& draft_tokens,
                         const OptionalTensor& allowed, const Numbers& ensemble, const Numbers& sampling,
                         const Rows& rows, const Numbers& processing, const Rows& processing_rows) {
    Call given(member_logits, {allowed, ensemble, sampling, rows, processing, processing_rows});
    const Tensor* drafts = given.view(draft_tokens);
    const LogprobArguments call(&given.target, drafts);
    float* logprobs = results.add<float>({call.target.batch, call.target.steps, call.target.vocab}, ScalarType::Float);
    results.finish(&given.target, drafts);
    const TorchThreads threads;
    target_logprobs(call, logprobs);
}

}  // namespace
}  // namespace specens

SPECENS_OPERATOR(target_logprobs, "Tensor[] member_logits, *, Tensor? draft_tokens=None, " SPECENS_TARGET_OPTIONS,
                 "Tensor", make_one)
