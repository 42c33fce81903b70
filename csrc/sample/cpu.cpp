#include <torch/csrc/stable/library.h>

#include "parts/parallel.h"
#include "parts/report.h"

namespace specens {
namespace {

struct SampleArguments {
    TargetArguments target;
    CoinView coins;
    int64_t step, stream;
    int64_t best;  // of so many Gumbel scores; 0: by inverse CDF
    ReportArguments report;

    explicit SampleArguments(ArgumentReader reader)
        : target(reader),
          coins(reader, target.batch, 1),
          step(reader.group().integer(0)),
          stream(reader.integer(0)),
          best(reader.integer(0)),
          report(reader) {
        target.read_weights(reader);
        require(best == 0, "this backend does not have the method");
        require(reader.rest().empty(), "one weight a member is needed");
        require(coins.any() || target.greedy(), "uniforms, or seeds and positions, are needed");
    }
};

// One request of the batch; kept by a thread from call to call.
class Sampler {
  public:
    void run(const SampleArguments& call, int64_t request) {
        token = -1;
        logprob = 0;
        status = status_invalid_parameter;
        const EnsembleParameters parameters = call.target.parameters(request);
        const bool greedy = parameters.temperature == 0;
        if (!call.target.valid(request) || (!greedy && !call.coins.valid(request, 0))) {
            return;
        }
        call.target.rows(request, 0, edits(call, request), logits_);
        row_.read(logits_, parameters, call.report.only_chosen());
        status = row_.status();
        if (!row_.alive()) {
            return;
        }
        const double coin = call.coins(request, 0, call.step, call.stream);
        token = greedy ? row_.most_likely() : draw_from(row_, coin, tile_masses_);
        if (call.report.only_chosen() && token >= 0) {
            logprob = static_cast<float>(row_.logprob(token));
        }
    }
    // What is reported of the token that was drawn last.
    void report(const SampleArguments& call, int64_t request, const ReportPlace& place) {
        place.pad(1, call.report.top);
        *place.logprob = logprob;
        if (token >= 0 && call.report.reads_again()) {
            const RowEdits* edits = call.target.edited() ? &edits_ : nullptr;  // still at the row
            reporter_.write(call.target, call.report, request, 0, edits, token, place);
        }
    }
    int64_t token = -1;
    float logprob = 0;
    int32_t status = status_ok;

  private:
    const RowEdits* edits(const SampleArguments& call, int64_t request) {
        if (!call.target.edited()) {
            return nullptr;
        }
        edits_.start(call.target.processing.of(request, call.target.vocab), request);
        edits_.enter_row(nullptr, 0, 0, call.target.mask(request, 0));
        return &edits_;
    }

    TargetRow row_;
    RowEdits edits_;
    Reporter reporter_;
    std::vector<LogitRow> logits_;
    std::vector<double> tile_masses_;
};

std::vector<Tensor> sample_cpu(const std::vector<Tensor>& tensors, const std::vector<int64_t>& integers,
                               const std::optional<std::vector<double>>& numbers) {
    const SampleArguments call(ArgumentReader(tensors, integers, numbers));
    const int64_t batch = call.target.batch;
    const int64_t top = call.report.top;
    std::vector<Tensor> output{new_tensor({batch}, ScalarType::Long), new_tensor({batch}, ScalarType::Int)};
    auto* token_out = output[0].mutable_data_ptr<int64_t>();
    auto* status_out = output[1].mutable_data_ptr<int32_t>();
    ReportPlace place{};
    if (call.report.kind != ReportArguments::Kind::none) {
        output.push_back(new_tensor({batch}, ScalarType::Float));
        place.logprob = output[2].mutable_data_ptr<float>();
    }
    if (top > 0) {
        output.push_back(new_tensor({batch, top}, ScalarType::Long));
        output.push_back(new_tensor({batch, top}, ScalarType::Float));
        place.top_tokens = output[3].mutable_data_ptr<int64_t>();
        place.top_logprobs = output[4].mutable_data_ptr<float>();
    }
    for_requests(batch, call.target.vocab, [&](int64_t begin, int64_t end) {
        static thread_local Sampler sampler;
        for (int64_t request = begin; request < end; ++request) {
            sampler.run(call, request);
            token_out[request] = sampler.token;
            status_out[request] = sampler.status;
            if (place.logprob != nullptr) {
                sampler.report(call, request, place.behind(request, top));
            }
        }
    });
    return output;
}

}  // namespace
}  // namespace specens

STABLE_TORCH_LIBRARY_IMPL(specens, CPU, library) { library.impl("sample_cpp", TORCH_BOX(&specens::sample_cpu)); }
