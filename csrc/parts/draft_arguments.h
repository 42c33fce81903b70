// Draft tokens and the distributions they were drawn from.
#pragma once

#include <optional>

#include "parts/target_arguments.h"

namespace specens {

constexpr int64_t no_drafter = -1;
constexpr int64_t most_drafts = int64_t{1} << 20;  // of a request: results have room for as many
constexpr int64_t as_tokens = -1;  // the most drafts of a request, where the shape of dense tokens tells it

struct DraftArguments {
    const Tensor *token_tensor, *drafter_tensor, *logit_tensor;
    IntegerRows slots, lens;  // [batch]
    int64_t drafter;          // a member, or no_drafter
    int64_t max_draft_len;    // the most of a request, or as_tokens
    bool processed;           // whether they were drawn from processed logits
    SamplingArguments sampling;
    bool packed;                      // tokens are [drafts], else [batch, draft_len]
    TokenTable tokens, drafters;      // of the same shape
    int64_t draft_len;                // the most of a request
    std::optional<LogitView> logits;  // [batch or slots, draft_len, vocab], or [drafts, vocab]
    int64_t known_tokens;  // ids below it are drafts, of target probability 0 outside the target's vocabulary

    // further_rows: of dense draft logits, behind those of the drafts.
    DraftArguments(const TargetArguments& target, ArgumentReader& reader, int64_t further_rows = 0)
        : token_tensor(reader.group().tensor()),
          drafter_tensor(reader.tensor()),
          logit_tensor(reader.tensor()),
          slots(reader.tensor(), target.batch),
          lens(reader.tensor(), target.batch),
          drafter(reader.integer(no_drafter)),
          max_draft_len(reader.integer(as_tokens)),
          processed(reader.integer(1) != 0),
          sampling(reader.has_group() ? SamplingArguments(reader, target.batch) : as_target(target, reader)),
          packed(target.packed() && token_tensor != nullptr && token_tensor->dim() == 1),
          tokens(table(token_tensor, target)),
          drafters(table(drafter_tensor, target)),
          draft_len(max_draft_len == as_tokens && !packed ? tokens.width : max_draft_len),
          known_tokens(target.vocab),
          target_(&target),
          bonus_rows_(target.steps - (packed ? token_tensor->size(0) : draft_len)) {
        check_tokens();
        if (logit_tensor != nullptr) {
            check_logits(further_rows);
            logits.emplace(*logit_tensor, packed && !slots.given());
            known_tokens = std::max(known_tokens, logits->vocab);
        }
    }
    // Whether it is told what drafts were drawn from.
    bool has_distributions() const {
        return logit_tensor != nullptr || drafter_tensor != nullptr || drafter != no_drafter;
    }
    int64_t token(int64_t request, int64_t step) const {
        return packed ? tokens(0, first_draft(request) + step) : tokens(request, step);
    }
    int64_t drafter_of(int64_t request, int64_t step) const {
        if (drafter_tensor == nullptr) {
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
        if (slots.given() && (slots(request) < 0 || slots(request) >= logit_tensor->size(0))) {
            return false;
        }
        const int64_t rows = num_rows(request);
        if (target_->packed() && rows != own && rows != own + 1) {
            return false;
        }
        return !packed || (first_draft(request) >= 0 && first_draft(request) + own <= tokens.width);
    }

  private:
    // Of a draft without sampling parameters of its own, whose group is gone past.
    static const SamplingArguments& as_target(const TargetArguments& target, ArgumentReader& reader) {
        reader.group();
        return target.sampling;
    }
    TokenTable table(const Tensor* tensor, const TargetArguments& target) const {
        return packed ? optional_integers(tensor, 1) : optional_integers(tensor, 2, target.batch);
    }
    void check_tokens() const {
        require(token_tensor != nullptr, "draft_tokens are needed");
        const int64_t width = tokens.width;
        require(draft_len >= 0 && draft_len <= most_drafts && (packed || width == draft_len),
                "draft_len is not that of the drafts");
        require(!target_->packed() || !packed || bonus_rows_ == 0 || bonus_rows_ == target_->batch,
                "packed drafts must be one less than the rows, for each request, or as many");
        require(target_->packed() || bonus_rows_ == 0 || bonus_rows_ == 1, "steps must be draft_len or one more");
        require(!packed || !lens.given(), "packed drafts have their lengths from row_offsets");
        require(drafter_tensor == nullptr || drafters.width == width, "drafter must be like draft_tokens");
        require(drafter >= no_drafter && drafter < static_cast<int64_t>(target_->members.size()), "unknown drafter");
        require(logit_tensor == nullptr || (drafter == no_drafter && drafter_tensor == nullptr),
                "either a drafter or draft_logits");
        require(logit_tensor != nullptr || !slots.given(), "slots need draft_logits");
    }
    void check_logits(int64_t further_rows) const {
        const Tensor& values = *logit_tensor;
        if (slots.given()) {
            require(values.dim() == 3 && values.size(1) >= draft_len, "draft_logits must be [slots, draft_len, vocab]");
        } else if (packed) {
            require(values.dim() == 2 && values.size(0) == tokens.width, "draft_logits must be [drafts, vocab]");
        } else {
            require(values.dim() == 3 && values.size(0) == target_->batch && values.size(1) == draft_len + further_rows,
                    "draft_logits must be [batch, draft_len, vocab]");
        }
    }
    int64_t packed_rows(int64_t request) const {
        return target_->row_offsets(request + 1) - target_->row_offsets(request);
    }
    // Whether packed drafts leave each request one row more.
    int64_t bonus_each() const { return bonus_rows_ != 0 ? 1 : 0; }
    int64_t first_draft(int64_t request) const { return target_->row_offsets(request) - bonus_each() * request; }

    const TargetArguments* target_;
    int64_t bonus_rows_;  // dense: of each request; packed drafts: of all
};

// The distribution of one draft token: a softmax, or one-hot.
class DraftRow {
  public:
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
            LogitRow row =
                draft.logits ? draft.logit_row(request, row_index) : target.row(member, request, row_index, nullptr);
            row.edits = edits;
            source_.reset(row);
            own_.read(source_, temperature, filter, roughly);
            status_ = source_.status();
            softmax_ = &own_;
        }
        if (!softmax_->alive()) {
            softmax_ = nullptr;
            status_ |= status_invalid_draft_distribution;
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
        } else if (token_ / tile_size == tile) {
            masses[token_ % tile_size] -= 1.0f;
        }
    }

  private:
    int64_t token_ = 0;
    int32_t status_ = status_ok;
    const Softmax* softmax_ = nullptr;
    MemberSource source_;
    Softmax own_;
};

}  // namespace specens
