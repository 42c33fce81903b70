// Draft tokens and the distributions they were drawn from.
#pragma once

#include <optional>

#include "parts/target_arguments.h"

namespace specens {

constexpr int64_t no_drafter = -1;

struct DraftArguments {
    TokenTable tokens;        // [batch, draft_len], or [drafts] where they are packed
    const int64_t* drafters;  // like tokens
    const Tensor* logit_tensor;
    std::optional<LogitView> logits;  // [batch or slots, draft_len, vocab], or [drafts, vocab]
    const int64_t *slots, *lens;      // [batch]
    int64_t drafter;                  // a member, or no_drafter
    int64_t draft_len;                // the most of a request
    bool processed;                   // whether they were drawn from processed logits
    SamplingArguments sampling;
    int64_t known_tokens;  // ids below it are drafts, of target probability 0 outside the target's vocabulary

    DraftArguments(const TargetArguments& target, ArgumentReader& reader)
        : tokens(draft_tokens(target, reader.tensor())),
          drafters(optional_int64(reader.tensor())),
          logit_tensor(reader.tensor()),
          slots(optional_int64(reader.tensor())),
          lens(optional_int64(reader.tensor())),
          drafter(reader.integer()),
          draft_len(reader.integer()),
          processed(reader.integer() != 0),
          sampling(reader),
          known_tokens(target.vocab),
          row_offsets_(target.row_offsets),
          bonus_rows_(target.steps - tokens.width) {
        if (logit_tensor != nullptr) {
            logits.emplace(*logit_tensor, packed_ && slots == nullptr);
            known_tokens = std::max(known_tokens, logits->vocab);
        }
    }
    int64_t token(int64_t request, int64_t step) const {
        return packed_ ? tokens(0, first_draft(request) + step) : tokens(request, step);
    }
    int64_t drafter_of(int64_t request, int64_t step) const {
        if (drafters == nullptr) {
            return drafter;
        }
        return drafters[packed_ ? first_draft(request) + step : request * draft_len + step];
    }
    LogitRow logit_row(int64_t request, int64_t step) const {
        if (slots != nullptr) {
            return logits->row(slots[request], step);
        }
        return packed_ ? logits->row(0, first_draft(request) + step) : logits->row(request, step);
    }
    // The drafts and the rows that a request says it has.
    int64_t len(int64_t request) const {
        if (lens != nullptr) {
            return lens[request];
        }
        if (row_offsets_ == nullptr) {
            return draft_len;
        }
        const int64_t rows = row_offsets_[request + 1] - row_offsets_[request];
        return packed_ ? rows - bonus_each() : std::max<int64_t>(rows - 1, 0);
    }
    int64_t num_rows(int64_t request) const {
        return row_offsets_ != nullptr ? row_offsets_[request + 1] - row_offsets_[request] : len(request) + bonus_rows_;
    }
    // Whether a request's layout and parameters are in range; `total_rows` of packed logits.
    bool valid(int64_t request, int64_t total_rows) const {
        const int64_t own = len(request);
        if (own < 0 || own > draft_len || !sampling.valid(request)) {
            return false;
        }
        if (slots != nullptr && (slots[request] < 0 || slots[request] >= logit_tensor->size(0))) {
            return false;
        }
        const int64_t rows = num_rows(request);
        return row_offsets_ == nullptr || ((rows == own || rows == own + 1) && row_offsets_[request] >= 0 &&
                                           row_offsets_[request + 1] <= total_rows);
    }

  private:
    TokenTable draft_tokens(const TargetArguments& target, const Tensor* tensor) {
        require(tensor != nullptr, "draft_tokens are needed");
        packed_ = target.row_offsets != nullptr && tensor->dim() == 1;
        return optional_tokens(tensor);
    }
    // Whether packed drafts leave each request one row more.
    int64_t bonus_each() const { return bonus_rows_ != 0 ? 1 : 0; }
    int64_t first_draft(int64_t request) const { return row_offsets_[request] - bonus_each() * request; }

    const int64_t* row_offsets_;
    int64_t bonus_rows_;  // dense: of each request; packed: of all
    bool packed_;
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
              int64_t step, const RowEdits* target_edits) {
        read(target, target_row, draft, request, step, step, target_edits);
    }
    // The draft of a step that was drawn at another row.
    void read(const TargetArguments& target, const TargetRow& target_row, const DraftArguments& draft, int64_t request,
              int64_t step, int64_t row_index, const RowEdits* target_edits) {
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
            own_.read(source_, temperature, filter);
            status_ = source_.status();
            softmax_ = &own_;
        }
        if (!softmax_->alive()) {
            softmax_ = nullptr;
            status_ |= status_invalid_draft_distribution;
        }
    }
    // Another token that was drawn from the same distribution.
    void set_token(int64_t token) { token_ = token; }
    const Softmax* softmax() const { return softmax_; }  // nullptr: one-hot
    int64_t token() const { return token_; }
    int32_t status() const { return status_; }
    double probability() const { return softmax_ != nullptr ? softmax_->probability(token_) : 1.0; }
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
