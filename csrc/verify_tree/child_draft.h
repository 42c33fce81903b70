// What the children of a row were drawn from, one after the other.
#pragma once

#include <algorithm>
#include <vector>

#include "parts/draft_arguments.h"

namespace specens {

class ChildDraft {
  public:
    void reserve(const Sizes& most) {
        draft_.reserve(most);
        reserve_all(most.nodes, taken_);
    }
    // The next child is the first one of a row.
    void enter_row() {
        taken_.clear();
        known_ = false;
    }
    void read(const TargetArguments& target, const TargetRow& target_row, const DraftArguments& draft, int64_t request,
              int64_t node, int64_t row, const RowEdits* edits, bool without_replacement) {
        const int64_t drafter = draft.drafter_of(request, node);
        if (known_ && drafter == drafter_) {
            draft_.set_token(draft.token(request, node));
        } else {
            draft_.read(target, target_row, draft, request, node, row, edits);
        }
        known_ = true;
        drafter_ = drafter;
        softmax_ = draft_.softmax();
        status_ = draft_.status();
        scale_ = 1;
        is_taken_ = std::find(taken_.begin(), taken_.end(), token()) != taken_.end();
        if (softmax_ != nullptr && !taken_.empty()) {
            scale_without_taken(tile_count(draft.known_tokens));
        }
        if (without_replacement && !is_taken_) {
            taken_.push_back(token());
        }
    }
    int64_t token() const { return draft_.token(); }
    int32_t status() const { return status_; }
    // Whether it was drawn from a distribution, else it was chosen.
    bool drawn() const { return softmax_ != nullptr; }
    // Takes so many times its distribution in the place of that.
    void multiply(double factor) { scale_ *= factor; }
    double probability() const {
        if (softmax_ == nullptr) {
            return 1;
        }
        return is_taken_ ? 0 : scale_ * softmax_->probability(token());
    }
    // out[i] += probability(first token of the tile + i), of one that was drawn with replacement
    void add_tile(int64_t tile, float* out) const { softmax_->add_tile(tile, scale_, out); }
    // masses[i] -= probability(first token of the tile + i). Of tokens that siblings took nothing is left to subtract
    // from, so they are not set apart.
    void subtract_tile(int64_t tile, float* masses) const {
        if (softmax_ != nullptr) {
            softmax_->add_tile(tile, -scale_, masses);
        } else if (token() / tile_size == tile) {
            masses[token() % tile_size] -= 1.0f;
        }
    }

  private:
    // One-hot where all that could be drawn is taken.
    void scale_without_taken(int64_t tiles) {
        constexpr double least_mass_left = 0x1p-100;
        double mass = 0;
        for (int64_t tile = 0; tile < tiles; ++tile) {
            mass += mass_without_taken(tile);
        }
        if (mass > least_mass_left) {
            scale_ = 1 / mass;
        } else {
            softmax_ = nullptr;
            status_ |= status_invalid_draft_distribution;
        }
    }
    double mass_without_taken(int64_t tile) const {
        const auto here = [tile](int64_t token) { return token / tile_size == tile; };
        if (std::none_of(taken_.begin(), taken_.end(), here)) {
            return softmax_->tile_mass(tile);
        }
        alignas(64) float masses[tile_size] = {};
        softmax_->add_tile(tile, 1.0, masses);
        for (const int64_t token : taken_) {
            if (here(token)) {
                masses[token % tile_size] = 0;
            }
        }
        return row_kernels().clamp_sum(masses, tile_size);
    }

    DraftRow draft_;
    std::vector<int64_t> taken_;  // by the siblings before, if they were drawn without replacement
    const Softmax* softmax_ = nullptr;
    double scale_ = 1;
    int64_t drafter_ = no_drafter;
    int32_t status_ = status_ok;
    bool known_ = false, is_taken_ = false;
};

}  // namespace specens
