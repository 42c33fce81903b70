// What is left of a row's target distribution and of its share when children were rejected.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "parts/parallel.h"
#include "parts/target_arguments.h"
#include "verify_tree/child_draft.h"

namespace specens {

class Remainder {
  public:
    void reserve(const Sizes& most) {
        reserve_all(most.tokens(), masses_);
        reserve_all(most.tiles(), tile_masses_);
    }
    // Of a row that the text gets to with this probability.
    void start(const TargetRow& target, double share) {
        target_ = &target;
        share_ = share;
        lessened_ = false;
    }
    double share() const { return share_; }
    int64_t tiles() const { return target_->tiles(); }
    int64_t vocab() const { return target_->vocab(); }
    // What is left of each token, with the sum `mass`, 0 after the vocabulary up to the end of its last tile.
    const float* masses() {
        if (!lessened_) {
            make_room();
            for_tiles(target_->tiles(), target_->splittable(), [&](int64_t begin, int64_t end) {
                for (int64_t tile = begin; tile < end; ++tile) {
                    target_->write_tile(tile, masses_.data() + tile * tile_size);
                }
            });
        }
        std::fill(masses_.begin() + vocab(), masses_.begin() + tiles() * tile_size, 0.0f);
        return masses_.data();
    }
    double mass() const { return lessened_ ? mass_ : 1.0; }
    // Of a token, given that the text gets here.
    double probability(int64_t token) const {
        if (!target_->alive() || token >= target_->vocab()) {
            return 0;
        }
        return lessened_ ? masses_[token] / mass_ : target_->probability(token);
    }
    // Takes away a child that was rejected. Returns whether nothing but rounding is left: then the target is back.
    bool subtract(const ChildDraft& draft) {
        const double left = target_->alive() ? lessen(draft) : 0.0;
        const double rest = left + 1 - share_;
        share_ = rest > empty_residual_mass ? left / rest : 1.0;
        mass_ = left;
        lessened_ = left > empty_residual_mass;
        return !lessened_ && target_->alive();
    }
    int64_t draw(double uniform) {
        if (!lessened_) {
            return draw_from(*target_, uniform, tile_masses_);
        }
        return specens::draw(tile_masses_, target_->vocab(), uniform, [&](int64_t tile, float* masses) {
            std::copy_n(masses_.data() + tile * tile_size, tile_size, masses);
        });
    }

  private:
    // masses = max(share * what is left - draft, 0); returns their sum
    double lessen(const ChildDraft& draft) {
        make_room();
        tile_masses_.resize(target_->tiles());
        const auto factor = static_cast<float>(share_ / mass_);
        for_tiles(target_->tiles(), target_->splittable(), [&](int64_t begin, int64_t end) {
            for (int64_t tile = begin; tile < end; ++tile) {
                float* masses = masses_.data() + tile * tile_size;
                if (!lessened_) {
                    target_->write_tile(tile, masses, share_);
                } else {
                    std::transform(masses, masses + tile_size, masses, [factor](float mass) { return mass * factor; });
                }
                draft.subtract_tile(tile, masses);
                const int64_t width = std::min(tile_size, target_->vocab() - tile * tile_size);
                tile_masses_[tile] = row_kernels().clamp_sum(masses, width);
            }
        });
        return std::accumulate(tile_masses_.begin(), tile_masses_.end(), 0.0);
    }

    void make_room() { masses_.resize(std::max<size_t>(masses_.size(), target_->tiles() * tile_size)); }

    const TargetRow* target_ = nullptr;
    double share_ = 1, mass_ = 1;
    bool lessened_ = false;
    std::vector<float> masses_;  // [tiles * tile_size], with the sum mass_
    std::vector<double> tile_masses_;
};

}  // namespace specens
