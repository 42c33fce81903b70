#include "operators/call.h"
#include "operators/results.h"
#include "sample/shard.h"

namespace specens {
namespace {

void best_of_shard_cpu(Results& results, const Members& member_logits, const OptionalTensor& draft_tokens,
                       const OptionalTensor& seeds, const OptionalTensor& positions, int64_t first_token,
                       const OptionalTensor& allowed, const Numbers& ensemble, const Numbers& sampling,
                       const Rows& rows, const Numbers& processing, const Rows& processing_rows) {
    Call given(member_logits, {allowed, ensemble, sampling, rows, processing, processing_rows});
    const Tensor* drafts = given.view(draft_tokens);
    const Tensor* own_seeds = given.view(seeds);
    const ShardArguments call(&given.target, drafts, own_seeds, given.view(positions), first_token);
    const int64_t batch = call.target.batch, steps = call.target.steps;
    ShardResults found{};
    found.values = results.add<double>({batch, steps}, ScalarType::Double);
    found.tokens = results.add<int64_t>({batch, steps}, ScalarType::Long);
    found.status = results.add<int32_t>({batch, steps}, ScalarType::Int);
    const TorchThreads threads;
    best_of_shard(call, found);
}

}  // namespace
}  // namespace specens

STABLE_TORCH_LIBRARY_FRAGMENT(specens, library) {
    library.def(
        "best_of_shard(Tensor[] member_logits, *, Tensor? draft_tokens=None, Tensor? seeds=None, "
        "Tensor? positions=None, int first_token=0, " SPECENS_TARGET_OPTIONS ") -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(specens, CPU, library) {
    using Kernels = specens::Operator<&specens::best_of_shard_cpu>;
    library.impl("best_of_shard", TORCH_BOX(&Kernels::make));
}
