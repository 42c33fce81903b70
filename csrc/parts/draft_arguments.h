// Draft tokens and the distributions they were drawn from.
#pragma once

#include <optional>

#include "parts/target_arguments.h"

namespace specens {

constexpr int64_t no_drafter = -1;
constexpr int64_t most_drafts = int64_t{1} << 20;  // of a request: results have room for as many

class DraftArguments {
    specens_draft own_;  // what follows is made from it
    const TargetArguments* target_;

  public:
    bool packed;                    // tokens are [drafts], else [batch, draft_len]
    IntegerTable tokens, drafters;  // of the same shape
    IntegerRows slots, lens;        // [batch]
    int64_t drafter;                // a member, or no_drafter
    bool processed;                 // whether they were drawn from processed logits
    SamplingArguments sampling;
    int64_t draft_len;                // the most of a request
    std::optional<LogitView> logits;  // [batch or slots, draft_len, vocab], or [drafts, vocab]
    int64_t known_tokens;  // ids below it are drafts, of target probability 0 outside the target's vocabulary

    // further_rows: of dense draft logits, after those of the drafts.
    DraftArguments(const TargetArguments& target, const specens_draft* given, int64_t further_rows = 0)
        : own_(adopted("draft", given, specens_draft_init())),
          target_(&target),
          packed(target.packed() && own_.tokens != nullptr && own_.tokens->ndim == 1),
          tokens(table("draft_tokens", own_.tokens)),
          drafters(table("drafter", own_.drafters)),
          slots("draft_slots", own_.slots, target.batch),
          lens("draft_lens", own_.lens, target.batch),
          drafter(own_.drafter),
          processed(own_.processed != 0),
          sampling(own_.sampling != nullptr ? SamplingArguments(own_.sampling, target.batch) : target.sampling),
          draft_len(own_.max_draft_len < 0 && !packed ? tokens.columns : own_.max_draft_len),
          known_tokens(target.vocab),
          bonus_rows_(target.steps - (packed ? tokens.columns : draft_len)) {
        check_tokens();
        if (own_.logits != nullptr) {
            check_draft_logits(further_rows);
            logits.emplace(*own_.logits, packed && !slots.given());
            known_tokens = std::max(known_tokens, logits->vocab);
        }
    }
    // Whether it is told what drafts were drawn from.
    bool has_distributions() const {
        return own_.logits != nullptr || own_.drafters != nullptr || drafter != no_drafter;
    }
    int64_t token(int64_t request, int64_t step) const {
        return packed ? tokens(0, first_draft(request) + step) : tokens(request, step);
    }
    int64_t drafter_of(int64_t request, int64_t step) const {
        if (own_.drafters == nullptr) {
            return drafter;
        }
        return packed ? drafters(0, first_draft(request) + step) : drafters(request, step);
    }
    LogitRow logit_row(int64_t request, int64_t step) const {
        if (slots.given()) {
            return logits->row(slots(request), step);
        }
        return packed ? logits->row(0, first_draft(request) + step) : logits->row(request, step);
    }
    // The drafts and the rows that a request says it has.
    int64_t len(int64_t request) const {
        if (lens.given()) {
            return lens(request);
        }
        if (!target_->packed()) {
            return draft_len;
        }
        const int64_t rows = packed_rows(request);
        return packed ? rows - bonus_each() : std::max<int64_t>(rows - 1, 0);
    }
    int64_t num_rows(int64_t request) const {
        return target_->packed() ? packed_rows(request) : len(request) + bonus_rows_;
    }
    // Whether a request's layout and parameters are in range.
    bool valid(int64_t request) const {
        if (target_->packed()) {
            const int64_t first = target_->row_offsets(request);
            const int64_t end = target_->row_offsets(request + 1);
            if (first < 0 || end < first || end > target_->steps) {
                return false;
            }
        }
        const int64_t own = len(request);
        if (own < 0 || own > draft_len || !sampling.valid(request)) {
            return false;
        }
        if (slots.given() && (slots(request) < 0 || slots(request) >= size(*own_.logits, 0))) {
            return false;
        }
        const int64_t rows = num_rows(request);
        if (target_->packed() && rows != own && rows != own + 1) {
            return false;
        }
        return !packed || (first_draft(request) >= 0 && first_draft(request) + own <= tokens.columns);
    }

  private:
    IntegerTable table(const char* name, const Tensor* tensor) const {
        return packed ? IntegerTable(name, tensor, {any_size}) : IntegerTable(name, tensor, {target_->batch, any_size});
    }
    void check_tokens() const {
        require(own_.tokens != nullptr, "draft_tokens: expected integers, got none");
        if (draft_len < 0 || draft_len > most_drafts || (!packed && tokens.columns != draft_len)) {
            fail("max_draft_len",
                 packed ? "0 to " + std::to_string(most_drafts)
                        : "that of the drafts, " + std::to_string(tokens.columns),
                 std::to_string(draft_len));
        }
        require(!target_->packed() || !packed || bonus_rows_ == 0 || bonus_rows_ == target_->batch,
                "draft_tokens: expected one less than the rows, for each request, or as many, got other packed drafts");
        require(target_->packed() || bonus_rows_ == 0 || bonus_rows_ == 1,
                "member_logits: expected draft_len steps or one more, got others");
        require(!packed || !lens.given(), "draft_lens: expected none, as row_offsets tell them, got some");
        require(own_.drafters == nullptr || drafters.columns == tokens.columns,
                "drafter: expected the shape of draft_tokens, got another");
        if (drafter < no_drafter || drafter >= static_cast<int64_t>(target_->members.size())) {
            fail("drafter", "a member or -1", std::to_string(drafter));
        }
        require(own_.logits == nullptr || (drafter == no_drafter && own_.drafters == nullptr),
                "drafter, draft_logits: expected one of them, got both");
        require(own_.logits != nullptr || !slots.given(), "draft_slots: expected draft_logits, got none");
    }
    void check_draft_logits(int64_t further_rows) const {
        const Tensor& values = *own_.logits;
        check_logits("draft_logits", values);
        if (slots.given()) {
            if (values.ndim != 3 || size(values, 1) < draft_len) {
                fail("draft_logits", "[slots, draft_len or more, vocab]", shape_text(values));
            }
        } else if (packed) {
            require_shape("draft_logits", values, {tokens.columns, any_size});
        } else {
            require_shape("draft_logits", values, {target_->batch, draft_len + further_rows, any_size});
        }
    }
    int64_t packed_rows(int64_t request) const {
        return target_->row_offsets(request + 1) - target_->row_offsets(request);
    }
    // Whether packed drafts leave each request one row more.
    int64_t bonus_each() const { return bonus_rows_ != 0 ? 1 : 0; }
    int64_t first_draft(int64_t request) const { return target_->row_offsets(request) - bonus_each() * request; }

    int64_t bonus_rows_;  // dense: of each request; packed drafts: of all
};

// The distribution of one draft token: a softmax, or one-hot.
class DraftRow {
  public:
    void reserve(const Sizes& most) {
        own_.reserve(most);
        search_.reserve(most);
    }
    // As one-hot.
    void read_token(const DraftArguments& draft, int64_t request, int64_t step) {
        token_ = draft.token(request, step);
        softmax_ = nullptr;
        status_ = status_ok;
    }
    void read(const TargetArguments& target, const TargetRow& target_row, const DraftArguments& draft, int64_t request,
              int64_t step, const RowEdits* target_edits, bool roughly) {
        read(target, target_row, draft, request, step, step, target_edits, roughly);
    }
    // The draft of a step that was drawn at another row. roughly: for `bounds` alone until it is refined.
    void read(const TargetArguments& target, const TargetRow& target_row, const DraftArguments& draft, int64_t request,
              int64_t step, int64_t row_index, const RowEdits* target_edits, bool roughly = false) {
        read_token(draft, request, step);
        const double temperature = draft.sampling.temperature(request);
        const FilterParameters filter = draft.sampling.filter(request);
        const int64_t member = draft.drafter_of(request, step);
        if (temperature == 0 || (member == no_drafter && !draft.logits)) {
            return;
        }
        if (!draft.logits && (member < 0 || member >= static_cast<int64_t>(target.members.size()))) {
            status_ = status_invalid_draft_distribution;
            return;
        }
        const RowEdits* edits = draft.processed ? target_edits : nullptr;
        if (!draft.logits && edits == target_edits) {
            softmax_ = target_row.member_softmax(member, temperature, filter, status_);
        }
        if (softmax_ == nullptr) {
            start(target, draft, request, member, row_index, edits);
            own_.read(source_, temperature, filter, search_, roughly);
            status_ = source_.status();
            softmax_ = &own_;
        }
        if (!softmax_->alive()) {
            softmax_ = nullptr;
            status_ |= status_invalid_draft_distribution;
        }
    }
    // A slice of what a draft was drawn from, as `Softmax::resume` takes it; one-hot where the mass is negative.
    void resume(const TargetArguments& target, const DraftArguments& draft, int64_t request, int64_t step,
                const RowEdits* target_edits, const float* state, double mass, float least) {
        read_token(draft, request, step);
        if (mass >= 0) {
            start(target, draft, request, draft.drafter_of(request, step), step,
                  draft.processed ? target_edits : nullptr);
            own_.resume(source_, draft.sampling.temperature(request), search_, state, mass, least);
            softmax_ = &own_;
        }
    }
    // The target's row, of whose member this may be the distribution, is refined by itself.
    void refine() {
        if (softmax_ == &own_) {
            own_.refine();
        }
    }
    // Another token that was drawn from the same distribution.
    void set_token(int64_t token) { token_ = token; }
    const Softmax* softmax() const { return softmax_; }  // nullptr: one-hot
    int64_t token() const { return token_; }
    int32_t status() const { return status_; }
    double probability() const { return softmax_ != nullptr ? softmax_->probability(token_) : 1.0; }
    Bounds bounds() const { return softmax_ != nullptr ? softmax_->bounds(token_) : Bounds{1, 1}; }
    // masses[i] -= probability(first token of the tile + i)
    void subtract_tile(int64_t tile, float* masses) const {
        if (softmax_ != nullptr) {
            softmax_->add_tile(tile, -1.0, masses);  // beyond the target's vocabulary masses are not looked at
        } else if (token_ >= 0 && token_ / tile_size == tile) {
            masses[token_ % tile_size] -= 1.0f;
        }
    }

  private:
    void start(const TargetArguments& target, const DraftArguments& draft, int64_t request, int64_t member,
               int64_t row_index, const RowEdits* edits) {
        LogitRow row =
            draft.logits ? draft.logit_row(request, row_index) : target.row(member, request, row_index, nullptr);
        row.edits = edits;
        source_.reset(row);
    }
    int64_t token_ = 0;
    int32_t status_ = status_ok;
    const Softmax* softmax_ = nullptr;
    MemberSource source_;
    Softmax own_;
    ThresholdSearch search_;
};

// masses = max(share * target - draft, 0) of a tile, if they are asked for; returns their sum.
inline double residual_tile(const TargetRow& target, const DraftRow& draft, double share, int64_t tile, float* masses) {
    const Softmax* own = target.softmax();
    if (own != nullptr && draft.softmax() != nullptr && own->shares_tile(*draft.softmax(), tile)) {
        return own->excess_of(*draft.softmax(), share, tile, masses);
    }
    alignas(64) float scratch[tile_size];
    masses = masses != nullptr ? masses : scratch;
    target.write_tile(tile, masses, share);
    draft.subtract_tile(tile, masses);
    return row_kernels().clamp_sum(masses, std::min(tile_size, target.vocab() - tile * tile_size));
}

}  // namespace specens
