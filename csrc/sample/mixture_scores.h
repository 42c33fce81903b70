// The best scores of a mixture of probabilities, whose tokens' values are log-probabilities under it. They are known to
// float32 rounding at first; where that could decide otherwise than exact numbers, the few tokens in question are
// weighed again.
#pragma once

#include <vector>

#include "parts/target_row.h"
#include "sample/block_race.h"
#include "sample/exact_logits.h"

namespace specens {

class MixtureScores {
  public:
    void reserve(const Sizes& most) {
        reserve_all(most.members, parts_, terms_, normalisers_);
        reserve_all(most.members * tile_size, scratch_);
        reserve_all(most.members * groups_per_tile, maxima_);
        reserve_all(most.tiles(), tile_bounds_);
        reserve_all(most.tokens(), known_);
    }
    // target: the row as it has been read with these parameters.
    void find(const TargetRow& target, const std::vector<LogitRow>& rows, double temperature, RowNoise& noise,
              BestList& best);
    // What rounding can add to the difference of two scores.
    static double margin(const TargetRow& target);

  private:
    struct Part {
        const Softmax* softmax;
        size_t member;
        double log_share;
        const float* values;  // of the tile that is looked at; nullptr beyond the vocabulary
    };
    void visit_tile(int64_t tile, BestList& best);
    void visit_block(int64_t block, int64_t in_tile, BestList& best);
    void consider(int64_t token, const LargestNoise& largest, BestList& best);
    void weigh_exactly(const std::vector<LogitRow>& rows, double temperature, BestList& best);

    const TargetRow* target_ = nullptr;
    RowNoise* noise_ = nullptr;
    std::vector<Part> parts_;              // of the members with a share
    std::vector<float> scratch_, maxima_;  // of each part
    std::vector<double> tile_bounds_, terms_;
    std::vector<Scored> known_;
    std::vector<std::pair<double, double>> normalisers_;  // the largest logit, and the log of the sum relative to it
};

}  // namespace specens
