// The tokens of the best Gumbel scores of one row.
#pragma once

#include <optional>
#include <vector>

#include "sample/logit_scores.h"
#include "sample/mixture_scores.h"

namespace specens {

class BestScores {
  public:
    void reserve(const Sizes& most) {
        logits_.reserve(most);
        mixture_.reserve(most);
        target_.reserve(most);
        noise_.reserve(most);
        best_.reserve(most);
        reserve_all(most.tokens(), kept_);
    }
    // The `count` best, best first; fewer where fewer tokens have positive probability. `rows` are looked at until the
    // next call. key: none for requests that are known to be greedy, which have no noise.
    const std::vector<Scored>& find(const std::vector<LogitRow>& rows, const EnsembleParameters& parameters,
                                    std::optional<NoiseKey> key, int64_t count);
    // The best one, -1 where there is none.
    int64_t find_best(const std::vector<LogitRow>& rows, const EnsembleParameters& parameters,
                      std::optional<NoiseKey> key);
    int32_t status() const { return status_; }
    // Under the target, of the last row.
    double logprob(int64_t token);
    // The token's logit, or sum of weighted ones, whose score needed no probabilities.
    double logit(int64_t token) const { return logits_.logit(token); }

  private:
    void read_target();
    const std::vector<LogitRow>* rows_ = nullptr;
    EnsembleParameters parameters_{};
    LogitScores logits_;
    MixtureScores mixture_;
    TargetRow target_;
    bool target_is_read_ = false;
    RowNoise noise_;
    BestList best_;
    std::vector<int64_t> kept_;
    int32_t status_ = status_ok;
};

}  // namespace specens
