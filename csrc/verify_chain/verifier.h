// Verification of one request: the acceptance rules and the next token.
#pragma once

#include <numeric>
#include <optional>
#include <vector>

#include "parts/parallel.h"
#include "sample/best_scores.h"
#include "verify_chain/arguments.h"

namespace specens {

// Where a request's results go; of `draft_len + 1` tokens each.
struct RequestOutput {
    int64_t* tokens;
    ReportBuffers report;  // nullptr where it is not asked for
};

// One request of the batch; kept by a thread from call to call, so that nothing is allocated in between.
class Verifier {
  public:
    void reserve(const Sizes& most) {
        edits_.reserve(most);
        target_.reserve(most);
        draft_.reserve(most);
        scores_.reserve(most);
        reporter_.reserve(most);
        reserve_all(most.members, logits_);
        reserve_all(most.tiles(), tile_masses_);
        reserve_all(most.steps(), row_status_, row_logprobs_, drafts_);
    }
    void run(const ChainArguments& chain, int64_t request, const RequestOutput& output) {
        chain_ = &chain;
        request_ = request;
        output_ = output;
        num_accepted = 0;
        next_token = -1;
        status = status_ok;
        parameters_ = chain.target.parameters(request);
        greedy_ = parameters_.temperature == 0;
        if (!valid()) {
            status = status_invalid_parameter;
            return;
        }
        len_ = chain.draft.len(request);
        num_rows_ = chain.draft.num_rows(request);
        edited_ = chain.target.edited();
        if (edited_) {
            start_edits();
        }
        if (chain.rule.kind == RuleKind::block && !greedy_) {
            run_block();
        } else if (chain.rule.by_scores()) {
            run_by_scores();
        } else {
            run_in_order();
        }
        if (chain.report.reads_again()) {
            report();
        }
    }
    int64_t num_accepted = 0;
    int64_t next_token = -1;
    int32_t status = status_ok;

  private:
    // Whether there is a draft at `step`, and it is a token.
    bool has_draft(int64_t step) const {
        const int64_t token = step < len_ ? chain_->draft.token(request_, step) : -1;
        return token >= 0 && token < chain_->draft.known_tokens;
    }
    double uniform(int64_t step) const { return chain_->random(request_, step, step, 0); }
    bool valid() const {
        const int64_t draft_len = chain_->draft.draft_len;
        if (!chain_->target.valid(request_) || !chain_->draft.valid(request_)) {
            return false;
        }
        if (chain_->rule.compares() || chain_->rule.by_scores()) {
            return true;
        }
        const bool tests_by_uniforms = !greedy_ || chain_->rule.tests_greedy();
        for (int64_t step = 0; tests_by_uniforms && step < chain_->draft.len(request_); ++step) {
            if (!chain_->random.valid(request_, step)) {
                return false;
            }
        }
        return greedy_ || chain_->random.valid(request_, draft_len);
    }
    void start_edits() {
        int64_t vocab = std::max(chain_->target.vocab, chain_->draft.known_tokens);
        edits_.start(chain_->target.processing.of(request_, vocab), request_);
        drafts_.clear();
        for (int64_t step = 0; step < len_; ++step) {
            drafts_.push_back(chain_->draft.token(request_, step));
        }
    }
    const RowEdits* edits_at(int64_t step) {
        if (!edited_) {
            return nullptr;
        }
        edits_.enter_row(drafts_.data(), step, step, chain_->target.mask(request_, step));
        return &edits_;
    }
    // Whether the acceptance test of a draft is probably all that its rows are read for, and settled by bounds. Where
    // target and draft agree, bounds settle uniforms up to 1 / rough_excess; larger ones often reject besides.
    bool reads_roughly(int64_t step) const {
        return chain_->rule.kind == RuleKind::token && !greedy_ && !chain_->report.only_chosen() && step < len_ &&
               uniform(step) * rough_excess < 1;
    }
    // Reads the target's row, and the draft's where it has one; returns whether it has.
    bool read(int64_t step, bool roughly = false) {
        const RowEdits* edits = edits_at(step);
        chain_->target.rows(request_, step, edits, logits_);
        const bool drafted = has_draft(step);
        target_.read(logits_, parameters_, chain_->report.only_chosen(), roughly && drafted);
        if (drafted && (greedy_ || !chain_->rule.reads_draft())) {
            draft_.read_token(chain_->draft, request_, step);
        } else if (drafted) {
            draft_.read(chain_->target, target_, chain_->draft, request_, step, edits, roughly);
        }
        return drafted;
    }

    // Rules that look at one draft after the other, and at no row after the first rejection.
    void run_in_order() {
        for (; num_accepted < num_rows_; ++num_accepted) {
            const bool tests = read(num_accepted, reads_roughly(num_accepted));
            status |= target_.status() | (tests ? draft_.status() : status_ok);
            if (tests && accepts()) {
                emit(draft_.token());
                continue;
            }
            finish(tests, 1);
            return;
        }
    }
    // Each row has one token, that of the best score; a draft is accepted while it is that one.
    void run_by_scores() {
        for (; num_accepted < num_rows_; ++num_accepted) {
            const bool drafted = has_draft(num_accepted);
            status |= !drafted && num_accepted < len_ ? status_invalid_draft_token : status_ok;
            chain_->target.rows(request_, num_accepted, edits_at(num_accepted), logits_);
            const int64_t token =
                scores_.find_best(logits_, parameters_, chain_->random.noise_key(request_, num_accepted));
            status |= scores_.status();
            if (token >= 0) {
                emit_with(token, chain_->report.only_chosen() ? static_cast<float>(scores_.logprob(token)) : 0.0f);
            }
            if (token < 0 || !drafted || token != chain_->draft.token(request_, num_accepted)) {
                next_token = token;
                return;
            }
        }
    }
    bool accepts() {
        if (chain_->rule.kind == RuleKind::synthetic) {
            return uniform(num_accepted) < chain_->rule.rates[num_accepted];
        }
        if (!target_.alive()) {
            return false;
        }
        if (greedy_) {
            return draft_.token() == target_.most_likely();
        }
        if (chain_->rule.kind == RuleKind::token) {
            return accepts_by(uniform(num_accepted));
        }
        const double target = target_probability();
        return chain_->rule.compares() ? target > 0 && !gives_way() : chain_->rule.accepts(target, target_);
    }
    bool accepts_by(double uniform) {
        std::optional<bool> settled = settled_by(uniform);
        if (!settled) {
            draft_.refine();
            settled = settled_by(uniform);
        }
        if (!settled) {
            target_.refine();
            settled = settled_by(uniform);
        }
        return settled.value_or(false);
    }
    // Whether the draft is accepted, if the bounds of its probabilities tell.
    std::optional<bool> settled_by(double uniform) const {
        const Bounds target = draft_.token() < target_.vocab() ? target_.bounds(draft_.token()) : Bounds{0, 0};
        const Bounds draft = draft_.bounds();
        if (uniform * draft.high < target.low) {
            return true;
        }
        return uniform * draft.low < target.high ? std::nullopt : std::optional(false);
    }
    // Whether the target's most likely token replaces the draft.
    bool gives_way() const {
        const int64_t other = target_.most_likely();
        return draft_.token() != other && chain_->rule.replaces(draft_.probability(), target_.probability(other));
    }
    double target_probability() const {
        return draft_.token() < target_.vocab() ? target_.probability(draft_.token()) : 0.0;
    }

    // Block verification: the last prefix whose uniform is below the chance that it is kept as a whole.
    void run_block() {
        int64_t accepted = 0;
        double share = 1;
        double accepted_share = 1;
        int64_t length = 0;
        row_status_.assign(len_ + 1, status_ok);
        row_logprobs_.assign(len_ + 1, 0.0f);
        for (; share > 0 && has_draft(length); ++length) {
            read(length);
            row_status_[length] = target_.status() | draft_.status();
            if (length > 0 && uniform(length - 1) < kept_chance(share)) {
                accepted = length;
                accepted_share = share;
            }
            const double target = target_probability();
            share = target > 0 ? std::min(1.0, share * target / draft_.probability()) : 0.0;
            if (target > 0) {
                row_logprobs_[length] = chosen_logprob(draft_.token());
            }
        }
        if (length > 0 && !has_draft(length) && uniform(length - 1) < share) {
            accepted = length;
        }
        for (; num_accepted < accepted; ++num_accepted) {
            status |= row_status_[num_accepted];
            emit_with(chain_->draft.token(request_, num_accepted), row_logprobs_[num_accepted]);
        }
        if (num_accepted < num_rows_) {
            const bool rejected = read(num_accepted);
            status |= target_.status() | (rejected ? draft_.status() : status_ok);
            finish(rejected, accepted_share);
        }
    }
    // That a prefix with this share is kept, given the rows of the draft after it.
    double kept_chance(double share) {
        const double mass = target_.alive() ? residual_mass(share) : 0.0;
        const double rest = mass + 1 - share;
        return rest > empty_residual_mass ? mass / rest : 1.0;  // else target and draft agree to rounding
    }

    // The next token, from the rows that were read last.
    void finish(bool rejected, double share) {
        if (!rejected && num_accepted < len_) {
            status |= status_invalid_draft_token;
        }
        if (target_.alive()) {
            const bool subtracts = rejected && chain_->rule.subtracts();
            target_.refine();
            if (subtracts) {
                draft_.refine();
            }
            next_token = next(subtracts, share, chain_->random(request_, chain_->draft.draft_len, num_accepted, 1));
            emit(next_token);
        }
    }
    void emit(int64_t token) const { emit_with(token, chosen_logprob(token)); }
    void emit_with(int64_t token, float logprob) const {
        output_.tokens[num_accepted] = token;
        if (chain_->report.only_chosen()) {
            output_.report.logprob[num_accepted] = logprob;
        }
    }
    float chosen_logprob(int64_t token) const {
        return chain_->report.only_chosen() && token >= 0 ? static_cast<float>(target_.logprob(token)) : 0.0f;
    }
    void report() {
        for (int64_t step = 0; step < num_accepted + (next_token >= 0 ? 1 : 0); ++step) {
            const ReportBuffers buffers = output_.report.after(step, chain_->report.top);
            reporter_.write(chain_->target, chain_->report, request_, step, edits_at(step), output_.tokens[step],
                            buffers);
        }
    }
    int64_t next(bool subtracts, double share, double uniform) {
        if (greedy_ || chain_->rule.compares()) {
            return target_.most_likely();
        }
        if (subtracts) {
            if (residual_mass(share) > empty_residual_mass) {
                return specens::draw(tile_masses_, target_.vocab(), uniform, [&](int64_t tile, float* masses) {
                    residual_tile(target_, draft_, share, tile, masses);
                });
            }
            status |= status_empty_residual;
        }
        return draw_from(target_, uniform, tile_masses_);
    }
    double residual_mass(double share) {
        tile_masses_.resize(target_.tiles());
        for_tiles(target_.tiles(), target_.splittable(), [&](int64_t begin, int64_t end) {
            for (int64_t tile = begin; tile < end; ++tile) {
                tile_masses_[tile] = residual_tile(target_, draft_, share, tile, nullptr);
            }
        });
        return std::accumulate(tile_masses_.begin(), tile_masses_.end(), 0.0);
    }

    const ChainArguments* chain_ = nullptr;
    int64_t request_ = 0;
    int64_t len_ = 0;
    int64_t num_rows_ = 0;
    RequestOutput output_{};
    EnsembleParameters parameters_{};
    bool greedy_ = false;
    bool edited_ = false;
    RowEdits edits_;
    TargetRow target_;
    DraftRow draft_;
    BestScores scores_;
    Reporter reporter_;
    std::vector<LogitRow> logits_;
    std::vector<double> tile_masses_;
    std::vector<int32_t> row_status_;
    std::vector<float> row_logprobs_;
    std::vector<int64_t> drafts_;
};

}  // namespace specens
