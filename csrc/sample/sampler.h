// Draws of a batch.
#pragma once

#include <span>
#include <vector>

#include "parts/report.h"
#include "parts/scratch.h"
#include "sample/best_scores.h"

namespace specens {

struct SampleArguments {
    TargetArguments target;
    RandomNumbers random;
    int64_t step, stream;
    int64_t best;  // of so many Gumbel scores; 0: by inverse CDF
    ReportArguments report;

    explicit SampleArguments(const specens_draw& call)
        : target(call.target),
          random(call.random, target.batch, 1),
          step(call.step),
          stream(call.stream),
          best(call.gumbel_count),
          report(call.logprobs, call.top_logprobs) {
        require(!target.packed() && target.steps == 1, "member_logits: expected one row a request, got others");
        if (best < 0) {
            fail("gumbel_count", "0 or more", std::to_string(best));
        }
        require(best == 0 || random.uniforms == nullptr, "uniforms: expected none with Gumbel scores, got some");
        require(random.any() || target.greedy(), "random: expected uniforms, or seeds and positions, got neither");
    }
    int64_t count() const { return std::max<int64_t>(best, 1); }
};

// One request of the batch; kept by a thread from call to call.
class Sampler {
  public:
    void reserve(const Sizes& most) {
        row_.reserve(most);
        scores_.reserve(most);
        edits_.reserve(most);
        reporter_.reserve(most);
        reserve_all(most.members, logits_);
        reserve_all(most.tiles(), tile_masses_);
    }
    // Draws the tokens of a request into `tokens`, -1 where there is none.
    void run(const SampleArguments& call, int64_t request, std::span<int64_t> tokens) {
        std::fill(tokens.begin(), tokens.end(), int64_t{-1});
        status = status_invalid_parameter;
        const EnsembleParameters parameters = call.target.parameters(request);
        const bool greedy = parameters.temperature == 0;
        if (!call.target.valid(request) || (!greedy && !call.random.valid(request, 0))) {
            return;
        }
        call.target.rows(request, 0, edits(call, request), logits_);
        if (call.best > 0) {
            const auto& best = scores_.find(logits_, parameters, call.random.noise_key(request, call.step), call.best);
            std::transform(best.begin(), best.end(), tokens.begin(), [](const Scored& own) { return own.token; });
            status = scores_.status();
            return;
        }
        row_.read(logits_, parameters, call.report.only_chosen());
        status = row_.status();
        if (row_.alive()) {
            const double uniform = call.random(request, 0, call.step, call.stream);
            tokens[0] = greedy ? row_.most_likely() : draw_from(row_, uniform, tile_masses_);
        }
    }
    // What is told of the tokens that were drawn last: buffers.logprob has room for each, the rest is the row's.
    void report(const SampleArguments& call, int64_t request, std::span<const int64_t> tokens,
                const ReportBuffers& buffers) {
        buffers.pad(1, call.report.top);
        std::fill_n(buffers.logprob, tokens.size(), 0.0f);
        if (call.report.reads_again() && tokens[0] >= 0) {
            const RowEdits* edits = call.target.edited() ? &edits_ : nullptr;  // still at the row
            reporter_.write(call.target, call.report, request, 0, edits, tokens[0], buffers);
        }
        for (size_t index = 0; index < tokens.size() && tokens[index] >= 0; ++index) {
            const double logprob = call.report.reads_again() ? reporter_.logprob(tokens[index])
                                   : call.best > 0           ? scores_.logprob(tokens[index])
                                                             : row_.logprob(tokens[index]);
            buffers.logprob[index] = static_cast<float>(logprob);
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

// Writes the results, whose buffers are there. Scratch memory is the pool's, without one the thread's.
void sample(const SampleArguments& call, const specens_drawn& drawn, ScratchPool<Sampler>* pool = nullptr);

}  // namespace specens
