#include "sample/logit_scores.h"

#include <bit>
#include <cmath>

#include "parts/parallel.h"

namespace specens {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr float float_max = std::numeric_limits<float>::max();
constexpr double largest_factor = 1e300;  // a smaller one only loosens bounds
constexpr int64_t first_blocks = 4;       // of which a token each is looked at before any block as a whole

}  // namespace

void LogitScores::start(const std::vector<LogitRow>& rows, const EnsembleParameters& parameters) {
    const bool single = parameters.kind == EnsembleKind::single;
    parts_.clear();
    all_.clear();
    used_.clear();
    status_ = status_ok;
    temperature_ = parameters.temperature == 0 ? 1 : parameters.temperature;
    plausibility_ = single ? 0 : parameters.plausibility;
    int64_t widest = 0;
    for (size_t member = 0; member < rows.size(); ++member) {
        const double weight = single ? 1 : parameters.weights[member];
        all_.emplace_back(rows[member]);
        used_.push_back(weight != 0);
        widest = std::max(widest, rows[member].vocab);
        if (weight != 0) {
            parts_.push_back({all_.back(), weight});
        }
    }
    vocab_ = widest;
    for (const Part& part : parts_) {
        vocab_ = std::min(vocab_, part.logits.vocab());  // beyond it a member's logit counts as -inf
    }
    if (plausibility_ > 0) {
        vocab_ = std::min(vocab_, rows[0].vocab);
        first_maxima_.assign(tile_count(rows[0].vocab), -std::numeric_limits<float>::infinity());
    }
}

// A tile's largest logit, and what is unusual about it if the member is used.
float LogitScores::scan(const ExactLogits& logits, int64_t tile, bool used) {
    alignas(64) float scratch[tile_size];
    const int64_t count = std::min(tile_size, logits.vocab() - tile * tile_size);
    const TileScan seen = row_kernels().scan(logits.tile(tile, scratch), count);
    if (used && (seen.has_nan || seen.max > float_max)) {
        status_ |= (seen.has_nan ? status_nan_logits : 0) | (seen.max > float_max ? status_infinite_logits : 0);
    }
    return std::min(seen.max, float_max);
}

void LogitScores::read_tile(int64_t tile) {
    alignas(64) float scratch[tile_size];
    float group_max[groups_per_tile];
    const int64_t first = tile * tile_size;
    const int64_t count = std::min(tile_size, vocab_ - first);
    const TileScan seen = row_kernels().scan_groups(parts_[0].logits.tile(tile, scratch), count, group_max);
    if (seen.has_nan || seen.max > float_max) {
        status_ |= (seen.has_nan ? status_nan_logits : 0) | (seen.max > float_max ? status_infinite_logits : 0);
    }
    for (int64_t begin = 0; begin < count; begin += block_size) {
        maxima_[(first + begin) / block_size] = std::min(group_max[begin / block_size], float_max);
    }
}

void LogitScores::mix_run(int64_t first, int64_t count, double* totals) const {
    alignas(64) float scratch[tile_size];
    std::fill_n(totals, count, 0.0);
    for (const Part& part : parts_) {
        score_kernels().mix(part.logits.run(first, count, scratch), count, part.weight, totals);
    }
}

void LogitScores::read_mixed_tile(int64_t tile) {
    for (size_t member = 0; member < all_.size(); ++member) {
        if (tile < tile_count(all_[member].vocab()) && (used_[member] != 0 || (member == 0 && plausibility_ > 0))) {
            const float largest = scan(all_[member], tile, used_[member] != 0);
            if (member == 0 && plausibility_ > 0) {
                first_maxima_[tile] = largest;
            }
        }
    }
    const int64_t first = tile * tile_size;
    const int64_t count = std::min(tile_size, vocab_ - first);
    if (count <= 0) {
        return;
    }
    alignas(64) double totals[tile_size];
    mix_run(first, count, totals);
    for (int64_t begin = 0; begin < count; begin += block_size) {
        const int64_t end = std::min(begin + block_size, count);
        double largest[8];
        std::fill_n(largest, 8, -infinity);
        int64_t index = begin;
        for (; index + 8 <= end; index += 8) {
            for (int lane = 0; lane < 8; ++lane) {
                largest[lane] = totals[index + lane] > largest[lane] ? totals[index + lane] : largest[lane];
            }
        }
        for (; index < end; ++index) {
            largest[0] = std::max(largest[0], totals[index]);
        }
        maxima_[(first + begin) / block_size] = *std::max_element(largest, largest + 8);
    }
}

void LogitScores::read(RowNoise& noise) {
    maxima_.resize(noise.blocks());
    int64_t tiles = tile_count(vocab_);
    for (const ExactLogits& logits : all_) {
        tiles = std::max(tiles, tile_count(logits.vocab()));
    }
    for_tiles(tiles, true, [&](int64_t begin, int64_t end) {
        for (int64_t tile = begin; tile < end; ++tile) {
            if (lone()) {
                read_tile(tile);
            } else {
                read_mixed_tile(tile);
            }
            noise.draw_tile(tile);
        }
    });
    if (plausibility_ > 0) {
        plausible_ = *std::max_element(first_maxima_.begin(), first_maxima_.end()) + std::log(plausibility_);
    }
    origin_ = *std::max_element(maxima_.begin(), maxima_.end());
}

double LogitScores::logit(int64_t token) const {
    if (plausibility_ > 0 && all_[0].logit(token) < plausible_) {
        return -infinity;
    }
    if (lone()) {
        return parts_[0].logits.logit(token);
    }
    double total = 0;
    for (const Part& part : parts_) {
        const double own = part.logits.logit(token);
        if (own == -infinity) {
            return -infinity;
        }
        total += part.weight * own;
    }
    return total;
}

template <typename Consider>
void LogitScores::for_logits_at_least(int64_t block, double limit, const Consider& consider) const {
    const int64_t first = block * block_size;
    const int64_t count = std::min(block_size, vocab_ - first);
    if (!lone()) {
        alignas(64) double totals[block_size];
        mix_run(first, count, totals);
        for (int64_t index = 0; index < count; ++index) {
            if (totals[index] >= limit) {
                consider(first + index);
            }
        }
        return;
    }
    alignas(64) float scratch[block_size];
    uint64_t bits[2];
    const auto below = static_cast<float>(limit);
    score_kernels().at_least(parts_[0].logits.run(first, count, scratch), count,
                             below > limit ? std::nextafter(below, -float_max) : below, bits);
    for (int64_t half = 0; half < 2; ++half) {
        for (uint64_t left = bits[half]; left != 0; left &= left - 1) {
            consider(first + half * 64 + std::countr_zero(left));
        }
    }
}

void LogitScores::visit(int64_t block, const RowNoise& noise, BestList& best) const {
    const double largest = noise.exp_minus_largest(block);
    const double least_value = best.limit() + std::log(largest);  // what the largest noise of the block lifts to it
    if (value(maxima_[block]) < least_value) {
        return;
    }
    // products and sums are rounded
    const double least = origin_ + least_value * temperature_;
    const double limit = least - (std::abs(origin_) + std::abs(least)) * 1e-14;
    for_logits_at_least(block, limit == limit ? limit : -infinity,
                        [&](int64_t token) { consider(token, largest, noise, best); });
}

void LogitScores::find(RowNoise& noise, BestList& best) {
    read(noise);
    if (origin_ == -infinity) {
        status_ |= status_no_token;
        return;
    }
    order_.start(maxima_, origin_, std::min(1 / temperature_, largest_factor), noise);
    taken_.clear();
    const auto wanted = std::max<size_t>(first_blocks, best.count());
    for (int64_t block = 0; taken_.size() < wanted && (block = order_.pop(best.limit())) >= 0;) {
        taken_.push_back(block);
        const double largest = noise.exp_minus_largest(block);
        for_logits_at_least(block, maxima_[block], [&](int64_t token) { consider(token, largest, noise, best); });
        const int64_t lifted = noise.token_of_largest(block);
        if (lifted < vocab_) {
            consider(lifted, largest, noise, best);
        }
    }
    for (const int64_t block : taken_) {
        visit(block, noise, best);
    }
    order_.for_rest([&] { return best.limit(); }, [&](int64_t block) { visit(block, noise, best); });
}

void LogitScores::consider(int64_t token, double exp_minus_largest, const RowNoise& noise, BestList& best) const {
    best.add({noise.score(token, value(logit(token)), exp_minus_largest), token});
}

void LogitScores::find_among(const std::vector<int64_t>& tokens, RowNoise& noise, BestList& best) {
    plausibility_ = 0;  // all of these are plausible
    logits_.clear();
    for (const int64_t token : tokens) {
        logits_.push_back(logit(token));
    }
    origin_ = *std::max_element(logits_.begin(), logits_.end());
    int64_t block = -1;
    double largest = 1;
    for (size_t index = 0; index < tokens.size(); ++index) {
        if (tokens[index] / block_size != block) {
            block = tokens[index] / block_size;
            largest = noise.draw_block(block);
        }
        const double own = value(logits_[index]);
        if (own - std::log(largest) >= best.limit()) {
            best.add({noise.score(tokens[index], own, largest), tokens[index]});
        }
    }
}

}  // namespace specens
