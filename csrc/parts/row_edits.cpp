#include "parts/row_edits.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace specens {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

}  // namespace

RowEdits::Edit& RowEdits::edit_of(int64_t token) {
    int32_t& index = indices_[token];
    if (index == 0) {
        edits_.push_back({token});
        index = static_cast<int32_t>(edits_.size());
    }
    return edits_[index - 1];
}

template <typename Change>
void RowEdits::change_all(const IntegerTable& table, int64_t request, Change change) {
    for (int64_t index = 0; index < table.columns; ++index) {
        const int64_t token = table(request, index);
        if (token >= 0 && token < processing_.vocab) {
            change(edit_of(token), index);
        }
    }
}

void RowEdits::start(const RequestProcessing& processing, int64_t request) {
    processing_ = processing;
    for (const Edit& edit : edits_) {
        indices_[edit.token] = 0;
    }
    edits_.clear();
    if (static_cast<int64_t>(indices_.size()) < processing.vocab) {
        indices_.resize(processing.vocab);
    }
    change_all(processing.bias_tokens, request,
               [&](Edit& edit, int64_t index) { edit.bias += processing.bias_values[index]; });
    change_all(processing.end_tokens, request, [](Edit& edit, int64_t) { edit.ends = true; });
    change_all(processing.prompt_tokens, request, [](Edit& edit, int64_t) { edit.prompt = true; });
    change_all(processing.output_tokens, request, [](Edit& edit, int64_t) { ++edit.output; });
    sort_by_tile();
}

void RowEdits::sort_by_tile() {
    starts_.assign((processing_.vocab + tile_size - 1) / tile_size + 1, 0);
    for (const Edit& edit : edits_) {
        ++starts_[edit.token / tile_size + 1];
    }
    for (size_t tile = 1; tile < starts_.size(); ++tile) {
        starts_[tile] += starts_[tile - 1];
    }
    unsorted_ = edits_;
    for (const Edit& edit : unsorted_) {
        const int32_t index = starts_[edit.token / tile_size]++;
        edits_[index] = edit;
        indices_[edit.token] = index + 1;
    }
    // each start has moved to the next tile's
    std::copy_backward(starts_.begin(), starts_.end() - 1, starts_.end());
    starts_[0] = 0;
}

void RowEdits::enter_row(const int64_t* drafts, int64_t num_drafts, int64_t row, TokenMask allowed) {
    allowed_ = allowed;
    holds_ends_back_ = row < processing_.min_tokens;
    for (Edit& edit : edits_) {
        edit.drafts = 0;
    }
    while (static_cast<int32_t>(edits_.size()) > starts_.back()) {
        indices_[edits_.back().token] = 0;
        edits_.pop_back();
    }
    for (int64_t step = 0; step < num_drafts; ++step) {
        if (drafts[step] >= 0 && drafts[step] < processing_.vocab) {
            ++edit_of(drafts[step]).drafts;
        }
    }
}

bool RowEdits::touches(int64_t tile) const {
    return allowed_.words != nullptr || starts_[tile] < starts_[tile + 1] ||
           std::any_of(
               edits_.begin() + starts_.back(), edits_.end(),
               [tile](const Edit& edit) { return edit.token / tile_size == tile; });
}

// In double: only what is beyond float32 in the end is infinite.
double RowEdits::edited(const Edit& edit, double before) const {
    const int32_t output = edit.output + edit.drafts;
    double logit = before + edit.bias;
    if (edit.prompt || output > 0) {
        const double penalty = processing_.repetition_penalty;
        logit = logit > 0 ? logit / penalty : logit * penalty;
    }
    if (output > 0) {
        logit -= processing_.frequency_penalty * output + processing_.presence_penalty;
    }
    return edit.ends && holds_ends_back_ ? -infinity : logit;
}

void RowEdits::apply_tile(int64_t tile, int64_t count, float* logits) const {
    apply_run(tile * tile_size, count, logits);
}

void RowEdits::apply_run(int64_t first, int64_t count, float* logits, bool upwards) const {
    const int64_t tile = first / tile_size;
    const auto change = [&](const Edit& edit) {
        if (edit.token >= first && edit.token < first + count) {  // the member's vocabulary may be smaller
            const double exact = edited(edit, logits[edit.token - first]);
            const auto nearest = static_cast<float>(exact);
            logits[edit.token - first] = upwards && nearest < exact ? std::nextafter(nearest, infinity) : nearest;
        }
    };
    std::for_each(edits_.begin() + starts_[tile], edits_.begin() + starts_[tile + 1], change);
    std::for_each(edits_.begin() + starts_.back(), edits_.end(), change);
    if (allowed_.words != nullptr) {
        const int64_t known = std::clamp<int64_t>(allowed_.count * 32 - first, 0, count);
        if (known > 0) {
            row_kernels().keep_bits(allowed_.words + first / 32, known, -infinity, logits);
        }
        std::fill(logits + known, logits + count, -infinity);
    }
}

double RowEdits::apply(int64_t token, double logit) const {
    const int32_t index = token < processing_.vocab ? indices_[token] : 0;
    const double result = index != 0 ? edited(edits_[index - 1], logit) : logit;
    if (allowed_.words == nullptr) {
        return result;
    }
    const bool known = token / 32 < allowed_.count;
    return known && (static_cast<uint32_t>(allowed_.words[token / 32]) >> token % 32 & 1) != 0 ? result : -infinity;
}

}  // namespace specens
