#include <torch/csrc/stable/library.h>

#include <tuple>

#include "parts/arguments.h"
#include "parts/parallel.h"

namespace specens {
namespace {

std::tuple<Tensor, Tensor, Tensor> sample_cpu(
    const std::vector<Tensor>& member_logits, int64_t ensemble, const std::vector<double>& weights,
    const std::optional<Tensor>& weight_rows, double plausibility, bool filter_members, double temperature,
    const std::optional<Tensor>& temperatures, int64_t top_k, const std::optional<Tensor>& top_ks, double top_p,
    const std::optional<Tensor>& top_ps, double min_p, const std::optional<Tensor>& min_ps, bool min_p_first,
    const std::optional<Tensor>& uniforms, const std::optional<Tensor>& seeds, const std::optional<Tensor>& positions,
    int64_t step, int64_t stream, bool logprobs) {
    const SamplingArguments sampling(temperature, temperatures, top_k, top_ks, top_p, top_ps, min_p, min_ps,
                                     min_p_first);
    const TargetArguments target(member_logits, ensemble, weights, weight_rows, plausibility, filter_members, sampling);
    const CoinView coins(uniforms, seeds, positions, 1);
    const Tensor tokens = new_tensor({target.batch}, ScalarType::Long);
    const Tensor token_logprobs = new_tensor({logprobs ? target.batch : 0}, ScalarType::Float);
    const Tensor status = new_tensor({target.batch}, ScalarType::Int);
    auto* token_out = tokens.mutable_data_ptr<int64_t>();
    auto* logprob_out = token_logprobs.mutable_data_ptr<float>();
    auto* status_out = status.mutable_data_ptr<int32_t>();

    for_requests(target.batch, target.vocab, [&](int64_t begin, int64_t end) {
        static thread_local TargetRow row;
        static thread_local std::vector<LogitRow> logits;
        static thread_local std::vector<double> tile_masses;
        for (int64_t request = begin; request < end; ++request) {
            const EnsembleParameters parameters = target.parameters(request);
            const bool greedy = parameters.temperature == 0;
            token_out[request] = -1;
            status_out[request] = status_invalid_parameter;
            if (target.valid(request) && (greedy || coins.valid(request, 0))) {
                target.rows(request, 0, logits);
                row.read(logits, parameters, logprobs);
                status_out[request] = row.status();
                if (row.alive()) {
                    token_out[request] =
                        greedy ? row.most_likely() : draw_from(row, coins(request, 0, step, stream), tile_masses);
                }
            }
            if (logprobs) {
                const int64_t token = token_out[request];
                logprob_out[request] = token >= 0 ? static_cast<float>(row.logprob(token)) : 0.0f;
            }
        }
    });
    return {tokens, token_logprobs, status};
}

}  // namespace
}  // namespace specens

STABLE_TORCH_LIBRARY_IMPL(specens, CPU, library) { library.impl("sample_cpp", TORCH_BOX(&specens::sample_cpu)); }
