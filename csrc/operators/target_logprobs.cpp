#include "operators/call.h"
#include "target_logprobs/score.h"

namespace specens {
namespace {

TorchTensor target_logprobs_cpu(const Members& member_logits, const OptionalTensor& draft_tokens,
                                const OptionalTensor& allowed, const Numbers& ensemble, const Numbers& sampling,
                                const Rows& rows, const Numbers& processing, const Rows& processing_rows) {
    Call given(member_logits, {allowed, ensemble, sampling, rows, processing, processing_rows});
    const LogprobArguments call(&given.target, given.view(draft_tokens));
    TorchTensor logprobs = new_tensor({call.target.batch, call.target.steps, call.target.vocab}, ScalarType::Float);
    const TorchThreads threads;
    target_logprobs(call, logprobs.mutable_data_ptr<float>());
    return logprobs;
}

}  // namespace
}  // namespace specens

STABLE_TORCH_LIBRARY_FRAGMENT(specens, library) {
    library.def("target_logprobs(Tensor[] member_logits, *, Tensor? draft_tokens=None, " SPECENS_TARGET_OPTIONS
                ") -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(specens, CPU, library) {
    library.impl("target_logprobs", TORCH_BOX(&specens::target_logprobs_cpu));
}
