#include <torch/csrc/stable/library.h>

#include "parts/arguments.h"

namespace specens {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

Tensor target_logprobs_cpu(const std::vector<Tensor>& member_logits, int64_t ensemble,
                           const std::vector<double>& weights, const std::optional<Tensor>& weight_rows,
                           double plausibility, bool filter_members, double temperature,
                           const std::optional<Tensor>& temperatures, int64_t top_k,
                           const std::optional<Tensor>& top_ks, double top_p, const std::optional<Tensor>& top_ps,
                           double min_p, const std::optional<Tensor>& min_ps, bool min_p_first) {
    const SamplingArguments sampling(temperature, temperatures, top_k, top_ks, top_p, top_ps, min_p, min_ps,
                                     min_p_first);
    const TargetArguments target(member_logits, ensemble, weights, weight_rows, plausibility, filter_members, sampling);
    const Tensor logprobs = new_tensor({target.batch, target.steps, target.vocab}, ScalarType::Float);
    auto* out = logprobs.mutable_data_ptr<float>();
    torch::stable::parallel_for(0, target.batch * target.steps, 1, [&](int64_t begin, int64_t end) {
        static thread_local TargetRow row;
        static thread_local std::vector<LogitRow> logits;
        for (int64_t index = begin; index < end; ++index) {
            const int64_t request = index / target.steps;
            const EnsembleParameters parameters = target.parameters(request);
            float* row_out = out + index * target.vocab;
            std::fill(row_out, row_out + target.vocab, -infinity);
            if (!target.valid(request)) {
                continue;
            }
            target.rows(request, index % target.steps, logits);
            row.read(logits, parameters, parameters.temperature != 0);
            if (row.alive() && parameters.temperature == 0) {
                row_out[row.most_likely()] = 0;
            } else if (row.alive()) {
                for (int64_t tile = 0; tile < row.tiles(); ++tile) {
                    row.write_logprobs(tile, row_out + tile * tile_size);
                }
            }
        }
    });
    return logprobs;
}

}  // namespace
}  // namespace specens

STABLE_TORCH_LIBRARY_IMPL(specens, CPU, library) {
    library.impl("target_logprobs_cpp", TORCH_BOX(&specens::target_logprobs_cpu));
}
