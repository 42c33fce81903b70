#include "sample/mixture_scores.h"

#include <bit>
#include <cmath>

namespace specens {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

// log(sum_i exp(terms[i]))
double log_sum(const std::vector<double>& terms) {
    const double largest = *std::max_element(terms.begin(), terms.end());
    if (largest == -infinity) {
        return largest;
    }
    double total = 0;
    for (const double term : terms) {
        total += std::exp(term - largest);
    }
    return largest + std::log(total);
}

}  // namespace

double MixtureScores::margin(const TargetRow& target) {
    double largest = 0;
    for (size_t part = 0; part < target.parts(); ++part) {
        largest = std::max(largest, target.share(part) > 0 ? target.part(part).rounding() : 0.0);
    }
    return 2 * largest;
}

void MixtureScores::find(const TargetRow& target, const std::vector<LogitRow>& rows, double temperature,
                         RowNoise& noise, BestList& best) {
    target_ = &target;
    noise_ = &noise;
    parts_.clear();
    for (size_t index = 0; index < target.parts(); ++index) {
        if (target.share(index) > 0) {
            parts_.push_back({&target.part(index), index, std::log(target.share(index)), nullptr});
        }
    }
    scratch_.resize(parts_.size() * tile_size);
    maxima_.resize(parts_.size() * groups_per_tile);
    tile_bounds_.resize(target.tiles());
    noise.draw_tiles(0, target.tiles());
    for (int64_t tile = 0; tile < target.tiles(); ++tile) {
        const float* bounds = noise.bounds() + tile * blocks_per_tile;
        const int64_t blocks = std::min(blocks_per_tile, noise.blocks() - tile * blocks_per_tile);
        terms_.clear();
        for (const Part& part : parts_) {
            const bool there = tile < part.softmax->tiles();
            terms_.push_back(there ? part.log_share + part.softmax->logprob_of(part.softmax->tile_max(tile))
                                   : -infinity);
        }
        tile_bounds_[tile] = log_sum(terms_) + *std::max_element(bounds, bounds + blocks);
    }
    for (const Part& part : parts_) {
        const int64_t token = part.softmax->most_likely();
        consider(token, noise.largest(token / block_size), best);
    }
    for (auto tile = tile_bounds_.begin();;) {
        tile = std::max_element(tile_bounds_.begin(), tile_bounds_.end());
        if (*tile == -infinity || *tile < best.limit()) {
            break;
        }
        visit_tile(tile - tile_bounds_.begin(), best);
        *tile = -infinity;
    }
    if (best.ambiguous()) {
        weigh_exactly(rows, temperature, best);
    }
}

void MixtureScores::visit_tile(int64_t tile, BestList& best) {
    std::fill(maxima_.begin(), maxima_.end(), -std::numeric_limits<float>::infinity());
    for (size_t index = 0; index < parts_.size(); ++index) {
        Part& part = parts_[index];
        part.values = nullptr;
        if (tile < part.softmax->tiles()) {
            part.values = part.softmax->tile(tile, scratch_.data() + index * tile_size);
            row_kernels().scan_groups(part.values, part.softmax->width(tile), maxima_.data() + index * groups_per_tile);
        }
    }
    const int64_t first = tile * blocks_per_tile;
    for (int64_t block = first; block < std::min(first + blocks_per_tile, noise_->blocks()); ++block) {
        terms_.clear();
        for (size_t index = 0; index < parts_.size(); ++index) {
            const float largest = maxima_[index * groups_per_tile + block - first];
            terms_.push_back(parts_[index].log_share + parts_[index].softmax->logprob_of(largest));
        }
        if (log_sum(terms_) + noise_->bound(block) >= best.limit()) {
            visit_block(block, block - first, best);
        }
    }
}

// Where a token's probability reaches a limit, some part of the mixture is at least an equal share of that.
void MixtureScores::visit_block(int64_t block, int64_t in_tile, BestList& best) {
    const LargestNoise largest = noise_->largest(block);
    const double limit = best.limit() + std::log(largest.exp_minus) - std::log(parts_.size());
    uint64_t found[2] = {0, 0};
    for (const Part& part : parts_) {
        const int64_t first = in_tile * block_size;
        const int64_t tile = block / blocks_per_tile;
        const int64_t count = part.values != nullptr ? part.softmax->width(tile) - first : 0;
        if (count > 0) {
            uint64_t bits[2];
            const float least = part.softmax->least_value_of(limit - part.log_share);
            score_kernels().at_least(part.values + first, std::min(count, block_size), least, bits);
            found[0] |= bits[0];
            found[1] |= bits[1];
        }
    }
    for (int64_t half = 0; half < 2; ++half) {
        for (uint64_t left = found[half]; left != 0; left &= left - 1) {
            consider(block * block_size + half * 64 + std::countr_zero(left), largest, best);
        }
    }
}

void MixtureScores::consider(int64_t token, const LargestNoise& largest, BestList& best) {
    const double score = noise_->score(token, target_->mixed_logprob(token), largest);
    if (score >= best.limit() && target_->keeps(token)) {
        best.add({score, token});
    }
}

// The members' normalisers in double; of a filtered member over what it keeps.
void MixtureScores::weigh_exactly(const std::vector<LogitRow>& rows, double temperature, BestList& best) {
    known_ = best.list();
    best.start(best.count(), 0);
    normalisers_.clear();
    for (const Part& part : parts_) {
        const ExactLogits logits(rows[part.member]);
        double largest = -infinity;
        for (int64_t token = 0; token < logits.vocab(); ++token) {
            largest = std::max(largest, logits.logit(token));
        }
        double total = 0;
        for (int64_t token = 0; token < logits.vocab(); ++token) {
            if (part.softmax->keeps(token)) {
                total += std::exp((logits.logit(token) - largest) / temperature);
            }
        }
        normalisers_.emplace_back(largest, std::log(total));
    }
    for (const Scored& own : known_) {
        terms_.clear();
        for (size_t index = 0; index < parts_.size(); ++index) {
            const Part& part = parts_[index];
            const ExactLogits logits(rows[part.member]);
            const auto [largest, log_total] = normalisers_[index];
            const bool kept = own.token < logits.vocab() && part.softmax->keeps(own.token);
            terms_.push_back(kept ? std::log(target_->share(part.member)) - log_total +
                                        (logits.logit(own.token) - largest) / temperature
                                  : -infinity);
        }
        const LargestNoise noise = noise_->largest(own.token / block_size);
        best.add({noise_->score(own.token, log_sum(terms_), noise), own.token});
    }
}

}  // namespace specens
