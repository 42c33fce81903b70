// The log-probabilities of every token of a batch's rows.
#pragma once

#include <limits>
#include <vector>

#include "parts/scratch.h"
#include "parts/target_arguments.h"

namespace specens {

struct LogprobArguments {
    TargetArguments target;
    IntegerTable drafts;  // [batch, steps - 1 or more]

    LogprobArguments(const specens_target* given, const Tensor* draft_tokens)
        : target(given), drafts("draft_tokens", draft_tokens, {target.batch, any_size}) {
        require(!target.packed(), "row_offsets: expected none, got some");
        if (drafts.given && drafts.columns < target.steps - 1) {
            fail("draft_tokens", "a token before each of " + std::to_string(target.steps) + " rows",
                 std::to_string(drafts.columns));
        }
    }
};

// The log-probabilities of one row; kept by a thread from call to call.
class RowScorer {
  public:
    void reserve(const Sizes& most) {
        row_.reserve(most);
        edits_.reserve(most);
        reserve_all(most.steps(), before_);
        reserve_all(most.members, logits_);
    }
    void run(const LogprobArguments& call, int64_t request, int64_t step, float* out) {
        const TargetArguments& target = call.target;
        std::fill(out, out + target.vocab, -std::numeric_limits<float>::infinity());
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
        for (int64_t index = 0; index < std::min(step, call.drafts.columns); ++index) {
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

// Writes [batch, steps, vocab]. Scratch memory is the pool's, without one the thread's.
void target_logprobs(const LogprobArguments& call, float* logprobs, ScratchPool<RowScorer>* pool = nullptr);

}  // namespace specens
