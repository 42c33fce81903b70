// The target distribution of one row: one member, or an ensemble of several.
#pragma once

#include <cstdint>
#include <vector>

#include "parts/filters.h"
#include "parts/softmax.h"
#include "parts/sources.h"

namespace specens {

enum class EnsembleKind : int64_t { single = 0, mixture = 1, logit_mixture = 2 };

// How a request's members become one distribution.
struct EnsembleParameters {
    EnsembleKind kind;
    Weights weights;      // [members]
    double plausibility;  // 0 is off
    double temperature;   // 0: greedy
    FilterParameters filter;
    bool filter_members;  // a mixture's members are filtered, else the mixture
};

// The target distribution of one row.
class TargetRow final : private SearchedRow {
  public:
    void reserve(const Sizes& most);
    // Reads the logits of every member. A greedy row without `probabilities` knows only `most_likely`, unless a mixture
    // needs them for it. roughly: for `bounds` alone until it is refined, where that saves time.
    void read(const std::vector<LogitRow>& rows, const EnsembleParameters& parameters, bool probabilities,
              bool roughly = false);
    void refine();
    // A row of which this is a slice, not filtered: as read, with what each part has kept [parts, state_size], and how
    // much of its mass is here, negative where it has no token anywhere. least: of the logits of each that are kept.
    void resume(const std::vector<LogitRow>& rows, const EnsembleParameters& parameters, const float* states,
                int64_t state_size, const double* masses, const float* least);
    int32_t status() const { return status_; }
    bool alive() const { return alive_; }
    int64_t vocab() const override { return vocab_; }
    int64_t tiles() const { return tile_count(vocab_); }
    bool splittable() const { return kind_ != EnsembleKind::logit_mixture; }
    int64_t most_likely() const;
    // Under the target; for greedy requests under the unfiltered ensemble at temperature 1.
    double probability(int64_t token) const;
    Bounds bounds(int64_t token) const;
    double logprob(int64_t token) const;
    void write_logprobs(int64_t tile, float* out) const;  // of the tokens of the vocabulary only
    double tile_mass(int64_t tile) const;
    // out[i] = share * probability(first token of the tile + i), 0 beyond the vocabulary
    void write_tile(int64_t tile, float* out, double share = 1) const;
    double entropy() const;  // in nats
    // The whole target, where it is one softmax; else nullptr.
    const Softmax* softmax() const { return kind_ == EnsembleKind::mixture ? nullptr : softmaxes_.data(); }
    // For scores: the parts of a mixture, and a token's log-probability under it before it is filtered as a whole.
    size_t parts() const { return shares_.size(); }
    double share(size_t part) const { return shares_[part]; }
    const Softmax& part(size_t part) const { return softmaxes_[part]; }
    double mixed_logprob(int64_t token) const;
    bool keeps(int64_t token) const { return !filtered_ || probability(token) > 0; }
    // A member's softmax at this temperature and filter and its status, if the ensemble has read it; else nullptr.
    const Softmax* member_softmax(int64_t member, double temperature, const FilterParameters& filter,
                                  int32_t& status) const;

  private:
    void start(const std::vector<LogitRow>& rows, const EnsembleParameters& parameters);
    void divide_shares(double total);
    int64_t most_likely_of_mixture() const;
    void filter_mixture(const FilterParameters& filter);
    void mix_tile(int64_t tile, double share, float* out) const;
    TileSource& source(size_t index);
    const float* values(int64_t tile, float* scratch) const override;
    const std::vector<float>& group_max() const override { return group_max_; }
    void masses(const float* values, int64_t count, float* out) const override;
    double total_mass() const override { return 1; }
    float value_of_mass(double mass) const override { return static_cast<float>(mass); }
    float scaled_value(float value, double share) const override { return static_cast<float>(value * share); }

    std::vector<MemberSource> members_;
    MixedSource mixed_;
    std::vector<double> shares_;      // of each member in a mixture, else one; 0: without weight or without a token
    std::vector<Softmax> softmaxes_;  // of each share, and those that rows before had
    EnsembleKind kind_ = EnsembleKind::single;
    double temperature_ = 1;
    FilterParameters member_filter_;
    int64_t vocab_ = 0;
    bool alive_ = false;
    int32_t status_ = status_ok;
    bool filtered_ = false;  // the mixture as a whole: its tokens below the threshold have no mass
    Kept kept_{};
    std::vector<float> group_max_;
    ThresholdSearch search_;
};

}  // namespace specens
