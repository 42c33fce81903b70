#include <torch/csrc/stable/library.h>

#include "parts/target_arguments.h"

namespace specens {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

struct LogprobArguments {
    TargetArguments target;
    TokenTable drafts;  // [batch, steps - 1 or more]

    explicit LogprobArguments(ArgumentReader reader)
        : target(reader), drafts(optional_integers(reader.group().tensor(), 2, target.batch)) {
        target.read_weights(reader);
        require(reader.rest().empty(), "one weight a member is needed");
        require(drafts.data == nullptr || drafts.width >= target.steps - 1, "a draft before each row is needed");
    }
};

// The log-probabilities of one row; kept by a thread from call to call.
class RowScorer {
  public:
    void run(const LogprobArguments& call, int64_t request, int64_t step, float* out) {
        const TargetArguments& target = call.target;
        std::fill(out, out + target.vocab, -infinity);
        if (!target.valid(request)) {
            return;
        }
        const EnsembleParameters parameters = target.parameters(request);
        const RowEdits* edits = target.edited() ? edits_at(call, request, step) : nullptr;
        target.rows(request, step, edits, logits_);
        row_.read(logits_, parameters, parameters.temperature != 0);
        if (row_.alive() && parameters.temperature == 0) {
            out[row_.most_likely()] = 0;
        } else if (row_.alive()) {
            for (int64_t tile = 0; tile < row_.tiles(); ++tile) {
                row_.write_logprobs(tile, out + tile * tile_size);
            }
        }
    }

  private:
    const RowEdits* edits_at(const LogprobArguments& call, int64_t request, int64_t step) {
        before_.clear();
        for (int64_t index = 0; index < std::min(step, call.drafts.width); ++index) {
            before_.push_back(call.drafts(request, index));
        }
        edits_.start(call.target.processing.of(request, call.target.vocab), request);
        edits_.enter_row(before_.data(), static_cast<int64_t>(before_.size()), step, call.target.mask(request, step));
        return &edits_;
    }

    TargetRow row_;
    RowEdits edits_;
    std::vector<int64_t> before_;
    std::vector<LogitRow> logits_;
};

Tensor target_logprobs_cpu(const std::vector<Tensor>& tensors, const std::vector<int64_t>& integers,
                           const std::optional<std::vector<double>>& numbers) {
    const LogprobArguments call(ArgumentReader(tensors, integers, numbers));
    const int64_t steps = call.target.steps;
    const int64_t vocab = call.target.vocab;
    const Tensor logprobs = new_tensor({call.target.batch, steps, vocab}, ScalarType::Float);
    auto* out = logprobs.mutable_data_ptr<float>();
    torch::stable::parallel_for(0, call.target.batch * steps, 1, [&](int64_t begin, int64_t end) {
        static thread_local RowScorer scorer;
        for (int64_t index = begin; index < end; ++index) {
            scorer.run(call, index / steps, index % steps, out + index * vocab);
        }
    });
    return logprobs;
}

}  // namespace
}  // namespace specens

STABLE_TORCH_LIBRARY_IMPL(specens, CPU, library) {
    library.impl("target_logprobs_cpp", TORCH_BOX(&specens::target_logprobs_cpu));
}
