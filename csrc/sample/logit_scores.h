// The best scores of a lone model or of a mixture of logits, which need no probabilities: a score is a logit over the
// temperature, plus noise.
#pragma once

#include <atomic>
#include <vector>

#include "parts/target_row.h"
#include "sample/block_race.h"
#include "sample/exact_logits.h"

namespace specens {

class LogitScores {
  public:
    void reserve(const Sizes& most) {
        reserve_all(most.members, parts_, all_, used_);
        reserve_all(most.tiles(), first_maxima_, tile_maxima_);
        reserve_all(most.blocks(), maxima_, mixed_maxima_, candidates_);
        reserve_all(most.tokens(), logits_, plausible_);
        bounds_.reserve(most);
        tokens_.reserve(most);
    }
    void start(const std::vector<LogitRow>& rows, const EnsembleParameters& parameters);
    int64_t vocab() const { return vocab_; }
    // Reads the row once, then the blocks that can hold the best.
    void find(RowNoise& noise, BestList& best);
    // Of these tokens only, in rising order.
    void find_among(const std::vector<int64_t>& tokens, RowNoise& noise, BestList& best);
    // Of the last `find`.
    int32_t status() const { return status_; }
    double logit(int64_t token) const;

  private:
    struct Part {
        ExactLogits logits;
        double weight;
    };
    void read(RowNoise& noise);
    void read_tile(int64_t tile);
    void read_mixed_tile(int64_t tile);
    void find_plausible();
    void try_best_blocks(const RowNoise& noise, BestList& best);
    void race_blocks(const RowNoise& noise, BestList& best);
    void race_among(const std::vector<int64_t>& tokens, RowNoise& noise, BestList& best);
    float scan(const ExactLogits& logits, int64_t tile, bool used);
    // sum_i weight_i * logit_i of a run, in `totals`; edited logits are rounded up.
    void mix_run(int64_t first, int64_t count, double* totals) const;
    void collect(int64_t block, const RowNoise& noise, BestList& best);
    void settle(const RowNoise& noise, BestList& best);
    void consider(int64_t token, const LargestNoise& largest, const RowNoise& noise, BestList& best) const;
    void consider_lifted(int64_t block, const RowNoise& noise, BestList& best) const;
    uint32_t least_word(int64_t block, double limit) const;
    double logit_of(double value) const;
    template <typename Consider>
    void for_logits_at_least(int64_t block, double limit, const Consider& consider) const;
    double value(double logit) const { return (logit - origin_) / temperature_; }

    std::vector<Part> parts_;
    bool lone_ = false;             // one part, whose logits are the scores' as they are
    std::vector<ExactLogits> all_;  // of every member
    std::vector<char> used_;
    double plausibility_ = 0;          // 0 is off
    std::vector<float> first_maxima_;  // of member 0's tiles
    double temperature_ = 1;
    int64_t vocab_ = 0;
    std::vector<float> tile_maxima_;
    std::vector<float> maxima_;         // of blocks, relative to the origin where logits are mixed
    std::vector<double> mixed_maxima_;  // of blocks, where they are
    std::vector<double> logits_;
    std::vector<int64_t> plausible_;   // tokens
    std::vector<int64_t> candidates_;  // blocks
    BlockBounds bounds_;
    WaitingTokens tokens_;
    double origin_ = 0;  // the largest logit
    std::atomic<int32_t> status_{status_ok};
};

}  // namespace specens
