#include <torch/csrc/stable/library.h>

#include <span>

#include "parts/parallel.h"
#include "parts/report.h"
#include "sample/best_scores.h"

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
        require(best >= 0 && (best == 0 || coins.uniforms == nullptr), "scores take no uniforms");
        require(reader.rest().empty(), "one weight a member is needed");
        require(coins.any() || target.greedy(), "uniforms, or seeds and positions, are needed");
    }
};

// One request of the batch; kept by a thread from call to call.
class Sampler {
  public:
    // Draws the tokens of a request into `tokens`, -1 where there is none.
    void run(const SampleArguments& call, int64_t request, std::span<int64_t> tokens) {
        std::fill(tokens.begin(), tokens.end(), int64_t{-1});
        status = status_invalid_parameter;
        const EnsembleParameters parameters = call.target.parameters(request);
        const bool greedy = parameters.temperature == 0;
        if (!call.target.valid(request) || (!greedy && !call.coins.valid(request, 0))) {
            return;
        }
        call.target.rows(request, 0, edits(call, request), logits_);
        if (call.best > 0) {
            const auto& best = scores_.find(logits_, parameters, call.coins.noise_key(request, call.step), call.best);
            std::transform(best.begin(), best.end(), tokens.begin(), [](const Scored& own) { return own.token; });
            status = scores_.status();
            return;
        }
        row_.read(logits_, parameters, call.report.only_chosen());
        status = row_.status();
        if (row_.alive()) {
            const double coin = call.coins(request, 0, call.step, call.stream);
            tokens[0] = greedy ? row_.most_likely() : draw_from(row_, coin, tile_masses_);
        }
    }
    // What is told of the tokens that were drawn last: place.logprob has room for each, the rest is the row's.
    void report(const SampleArguments& call, int64_t request, std::span<const int64_t> tokens,
                const ReportPlace& place) {
        place.pad(1, call.report.top);
        std::fill_n(place.logprob, tokens.size(), 0.0f);
        if (call.report.reads_again() && tokens[0] >= 0) {
            const RowEdits* edits = call.target.edited() ? &edits_ : nullptr;  // still at the row
            reporter_.write(call.target, call.report, request, 0, edits, tokens[0], place);
        }
        for (size_t index = 0; index < tokens.size() && tokens[index] >= 0; ++index) {
            const double logprob = call.report.reads_again() ? reporter_.logprob(tokens[index])
                                   : call.best > 0           ? scores_.logprob(tokens[index])
                                                             : row_.logprob(tokens[index]);
            place.logprob[index] = static_cast<float>(logprob);
        }
    }
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
    BestScores scores_;
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
    const int64_t count = std::max<int64_t>(call.best, 1);
    const auto shaped = [&](ScalarType dtype) {
        return call.best > 0 ? new_tensor({batch, count}, dtype) : new_tensor({batch}, dtype);
    };
    std::vector<Tensor> output{shaped(ScalarType::Long), new_tensor({batch}, ScalarType::Int)};
    auto* token_out = output[0].mutable_data_ptr<int64_t>();
    auto* status_out = output[1].mutable_data_ptr<int32_t>();
    ReportPlace place{};
    if (call.report.kind != ReportArguments::Kind::none) {
        output.push_back(shaped(ScalarType::Float));
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
            const std::span<int64_t> tokens(token_out + request * count, count);
            sampler.run(call, request, tokens);
            status_out[request] = sampler.status;
            if (place.logprob != nullptr) {
                ReportPlace own = place.behind(request, top);
                own.logprob = place.logprob + request * count;
                sampler.report(call, request, tokens, own);
            }
        }
    });
    return output;
}

}  // namespace
}  // namespace specens

STABLE_TORCH_LIBRARY_IMPL(specens, CPU, library) { library.impl("sample_cpp", TORCH_BOX(&specens::sample_cpu)); }
