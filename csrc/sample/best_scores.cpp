#include "sample/best_scores.h"

namespace specens {

void BestScores::read_target() {
    if (!target_is_read_) {
        target_.read(*rows_, parameters_, true);
        target_is_read_ = true;
    }
}

const std::vector<Scored>& BestScores::find(const std::vector<LogitRow>& rows, const EnsembleParameters& parameters,
                                            std::optional<NoiseKey> key, int64_t count) {
    rows_ = &rows;
    parameters_ = parameters;
    target_is_read_ = false;
    const bool greedy = parameters.temperature == 0;
    key = greedy ? std::nullopt : key;
    best_.start(count, 0);
    if (parameters.kind != EnsembleKind::mixture && (greedy || !parameters.filter.any())) {
        logits_.start(rows, parameters);
        noise_.start(key, logits_.vocab());
        logits_.find(noise_, best_);
        status_ = logits_.status();
        return best_.list();
    }
    read_target();
    status_ = target_.status();
    if (!target_.alive()) {
        return best_.list();
    }
    noise_.start(key, target_.vocab());
    if (parameters.kind == EnsembleKind::mixture) {
        best_.start(count, MixtureScores::margin(target_));
        mixture_.find(target_, rows, greedy ? 1 : parameters.temperature, noise_, best_);
    } else {
        kept_.clear();
        target_.softmax()->kept_tokens(kept_);
        logits_.start(rows, parameters);
        logits_.find_among(kept_, noise_, best_);
    }
    return best_.list();
}

int64_t BestScores::find_best(const std::vector<LogitRow>& rows, const EnsembleParameters& parameters,
                              std::optional<NoiseKey> key) {
    const std::vector<Scored>& best = find(rows, parameters, key, 1);
    return best.empty() ? -1 : best.front().token;
}

double BestScores::logprob(int64_t token) {
    read_target();
    return target_.logprob(token);
}

}  // namespace specens
