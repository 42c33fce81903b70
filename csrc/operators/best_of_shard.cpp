#include "operators/call.h"
#include "operators/results.h"
#include "parts/parallel.h"
#include "sample/shard.h"

namespace specens {
namespace {

void best_of_shard_cpu(Results& results, const Members& member_logits, const OptionalTensor& draft_tokens,
                       const OptionalTensor& parents, const OptionalTensor& seeds, const OptionalTensor& positions,
                       int64_t first_token, int64_t count, const OptionalTensor& allowed, const Numbers& ensemble,
                       const Numbers& sampling, const Rows& rows, const Numbers& processing,
                       const Rows& processing_rows) {
    Call given(member_logits, {allowed, ensemble, sampling, rows, processing, processing_rows});
    const Tensor* drafts = given.view(draft_tokens);
    const Tensor* nodes = given.view(parents);
    const Tensor* own_seeds = given.view(seeds);
    const ShardArguments call(&given.target, drafts, nodes, own_seeds, given.view(positions), first_token, count);
    const int64_t batch = call.target.batch, steps = call.target.steps;
    ShardResults found{};
    found.values = results.add<double>({batch, steps, count}, ScalarType::Double);
    found.tokens = results.add<int64_t>({batch, steps, count}, ScalarType::Long);
    found.status = results.add<int32_t>({batch, steps}, ScalarType::Int);
    const TorchThreads threads;
    best_of_shard(call, found);
}

// seeds [batch], positions [batch, rows], tokens [batch, rows, n] to the noise of each token.
void gumbel_noise_cpu(Results& results, const TorchTensor& seeds, const TorchTensor& positions,
                      const TorchTensor& tokens) {
    Views views(3);
    require(tokens.dim() == 3 && tokens.is_cpu(), "tokens: expected [batch, rows, n] on the CPU");
    const int64_t batch = tokens.size(0), rows = tokens.size(1), count = tokens.size(2);
    const IntegerRows own_seeds("seeds", views.add(seeds), batch);
    const IntegerTable own_positions("positions", views.add(positions), {batch, rows});
    require(tokens.scalar_type() == ScalarType::Long && tokens.is_contiguous(), "tokens: expected contiguous int64");
    const auto* ids = static_cast<const int64_t*>(tokens.const_data_ptr());
    double* out = results.add<double>({batch, rows, count}, ScalarType::Double);
    const TorchThreads threads;
    parallel_for(batch * rows, 16, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
            const NoiseKey key{static_cast<uint64_t>(own_seeds(row / rows)),
                               static_cast<uint64_t>(own_positions(row / rows, row % rows))};
            RowNoise noise;
            noise.start(key, 0);
            for (int64_t index = row * count; index < (row + 1) * count; ++index) {
                out[index] = noise.score(ids[index], 0, noise.largest(ids[index] / block_size));
            }
        }
    });
}

}  // namespace
}  // namespace specens

STABLE_TORCH_LIBRARY_FRAGMENT(specens, library) {
    library.def(
        "best_of_shard(Tensor[] member_logits, *, Tensor? draft_tokens=None, Tensor? parents=None, "
        "Tensor? seeds=None, Tensor? positions=None, int first_token=0, int count=1, " SPECENS_TARGET_OPTIONS
        ") -> Tensor[]");
    library.def("gumbel_noise(Tensor seeds, Tensor positions, Tensor tokens) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(specens, CPU, library) {
    using Kernels = specens::Operator<&specens::best_of_shard_cpu>;
    library.impl("best_of_shard", TORCH_BOX(&Kernels::make));
    library.impl("gumbel_noise", TORCH_BOX(&specens::Operator<&specens::gumbel_noise_cpu>::make_one));
}
