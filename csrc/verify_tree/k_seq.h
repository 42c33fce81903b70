// The ratio by which siblings that one drafter drew with replacement are tested alike: k-SEQ, Sun et al., SpecTr, 2023.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <vector>

#include "verify_tree/remainder.h"

namespace specens {

class SequentialRatio {
  public:
    void reserve(const Sizes& most) { reserve_all(most.tokens(), draft_); }
    // Of `count` siblings, from 1 to that number: with overlap = sum min(draft, target / ratio), one of them is
    // accepted with probability 1 - (1 - overlap)^count, which is ratio * overlap. Compared are the differences to 1,
    // which are told apart where nearly all drafts are accepted: that of the latter is a sum over the row.
    double find(Remainder& left, const ChildDraft& child, int64_t count) {
        const int64_t tiles = left.tiles();
        draft_.resize(std::max<size_t>(draft_.size(), tiles * tile_size));
        std::fill_n(draft_.begin(), tiles * tile_size, 0.0f);
        for (int64_t tile = 0; tile < tiles; ++tile) {
            child.add_tile(tile, draft_.data() + tile * tile_size);
        }
        std::fill(draft_.begin() + left.vocab(), draft_.begin() + tiles * tile_size, 0.0f);
        const float* target = left.masses();
        // Between numbers at which no token's target passes ratio * draft, that is target - ratio * draft of sums that
        // do not change: the root of these is tried next, so that few passes find that of the row.
        double low = 1, high = static_cast<double>(count);
        double ratio = (low + high) / 2;
        for (int pass = 0; pass < most_passes; ++pass) {
            const Excess sums = excess_at(target, tiles, left.mass(), ratio);
            (sums.suffices(ratio, count) ? high : low) = ratio;
            const double next = sums.root(low, high, count);
            if (std::abs(next - ratio) <= closeness * ratio) {
                return next;
            }
            ratio = next;
        }
        return high;
    }

  private:
    static constexpr int most_passes = 40, bisections = 50;
    static constexpr double closeness = 1e-9;

    // Sums over the tokens of a row whose target exceeds ratio * draft.
    struct Excess {
        double target, draft;
        // Whether what is accepted of no token exceeds its target probability.
        bool suffices(double ratio, int64_t count) const {
            const double left = std::max(0.0, target - ratio * draft);
            const double rejected = std::max(0.0, 1 - (1 - left) / ratio);
            return left <= std::pow(rejected, static_cast<double>(count));
        }
        double root(double low, double high, int64_t count) const {
            for (int step = 0; step < bisections; ++step) {
                const double middle = (low + high) / 2;
                (suffices(middle, count) ? high : low) = middle;
            }
            return high;
        }
    };

    using Four [[gnu::vector_size(16)]] = float;
    using Mask [[gnu::vector_size(16)]] = int32_t;
    static constexpr int64_t fours = 4;  // sums side by side

    // Both tables go on to the end of the last tile: after the vocabulary there is no draft, and no target.
    Excess excess_at(const float* target, int64_t tiles, double mass, double ratio) const {
        Excess sums{0, 0};
        const auto factor = static_cast<float>(ratio * mass);  // the target is over its mass
        for (int64_t tile = 0; tile < tiles; ++tile) {
            const float* of_target = target + tile * tile_size;
            const float* of_draft = draft_.data() + tile * tile_size;
            std::array<Four, fours> targets{}, drafts{};
            for (int64_t index = 0; index < tile_size; index += 4 * fours) {
                for (int64_t part = 0; part < fours; ++part) {
                    Four own, drawn;
                    std::memcpy(&own, of_target + index + 4 * part, sizeof own);
                    std::memcpy(&drawn, of_draft + index + 4 * part, sizeof drawn);
                    const Mask exceeds = own > factor * drawn;
                    targets[part] += Four(Mask(own) & exceeds);
                    drafts[part] += Four(Mask(drawn) & exceeds);
                }
            }
            for (int64_t part = 0; part < fours; ++part) {
                for (int lane = 0; lane < 4; ++lane) {
                    sums.target += targets[part][lane] / mass;
                    sums.draft += drafts[part][lane];
                }
            }
        }
        return sums;
    }

    std::vector<float> draft_;  // probabilities [tiles * tile_size]
};

}  // namespace specens
