#include "sample/logit_scores.h"

#include <bit>
#include <cmath>

#include "parts/parallel.h"

namespace specens {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr float float_max = std::numeric_limits<float>::max();
constexpr size_t tried_blocks = 6;  // of the best bounds, which set a first limit

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
    lone_ = parts_.size() == 1 && parts_[0].weight == 1 && plausibility_ == 0;
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
    const int64_t count = std::min(tile_size, vocab_ - tile * tile_size);
    float* maxima = maxima_.data() + tile * blocks_per_tile;
    const TileScan seen = row_kernels().scan_groups(parts_[0].logits.tile(tile, scratch), count, maxima);
    if (seen.has_nan || seen.max > float_max) {
        status_ |= (seen.has_nan ? status_nan_logits : 0) | (seen.max > float_max ? status_infinite_logits : 0);
        std::replace(maxima, maxima + blocks_per_tile, std::numeric_limits<float>::infinity(), float_max);
    }
    tile_maxima_[tile] = std::min(seen.max, float_max);
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
    if (count <= 0 || plausibility_ > 0) {
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
        mixed_maxima_[(first + begin) / block_size] = *std::max_element(largest, largest + 8);
    }
}

void LogitScores::read(RowNoise& noise) {
    constexpr float none = -std::numeric_limits<float>::infinity();
    maxima_.assign(tile_count(vocab_) * blocks_per_tile, none);
    tile_maxima_.resize(tile_count(vocab_));
    mixed_maxima_.resize(lone_ ? 0 : noise.blocks());
    int64_t tiles = tile_count(vocab_);
    for (const ExactLogits& logits : all_) {
        tiles = std::max(tiles, tile_count(logits.vocab()));
    }
    for_tiles(tiles, true, [&](int64_t begin, int64_t end) {
        if (plausibility_ == 0) {
            noise.draw_tiles(begin, end);
        }
        for (int64_t tile = begin; tile < end; ++tile) {
            if (!lone_) {
                read_mixed_tile(tile);
            } else if (tile < tile_count(vocab_)) {
                read_tile(tile);
            }
        }
    });
    if (lone_) {
        origin_ = *std::max_element(tile_maxima_.begin(), tile_maxima_.end());
        return;
    }
    if (plausibility_ > 0) {
        origin_ = *std::max_element(first_maxima_.begin(), first_maxima_.end());
        return;
    }
    origin_ = *std::max_element(mixed_maxima_.begin(), mixed_maxima_.end());
    std::transform(mixed_maxima_.begin(), mixed_maxima_.end(), maxima_.begin(), [&](double mixed) {
        return mixed > -infinity ? std::min(std::nextafter(static_cast<float>(mixed - origin_), 0.0f), 0.0f) : none;
    });
}

// The tokens to which member 0 gives at least `plausibility` times what it gives its most likely.
void LogitScores::find_plausible() {
    alignas(64) float scratch[block_size];
    const double least = origin_ + std::log(plausibility_);
    plausible_.clear();
    for (int64_t block = 0; block * block_size < vocab_; ++block) {
        const int64_t first = block * block_size;
        if (first_maxima_[first / tile_size] < float_below(least)) {
            continue;
        }
        uint64_t bits[2];
        const int64_t count = std::min(block_size, vocab_ - first);
        score_kernels().at_least(all_[0].run(first, count, scratch), count, float_below(least), bits);
        for_bits(bits, [&](int64_t index) {
            if (all_[0].logit(first + index) >= least) {
                plausible_.push_back(first + index);
            }
        });
    }
}

double LogitScores::logit(int64_t token) const {
    if (lone_) {
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
    if (!lone_) {
        alignas(64) double totals[block_size];
        mix_run(first, count, totals);
        for (int64_t index = 0; index < count; ++index) {
            if (totals[index] >= std::max(limit, std::numeric_limits<double>::lowest())) {
                consider(first + index);
            }
        }
        return;
    }
    alignas(64) float scratch[block_size];
    uint64_t bits[2];
    score_kernels().at_least(parts_[0].logits.run(first, count, scratch), count, float_below(limit), bits);
    for_bits(bits, [&](int64_t index) { consider(first + index); });
}

// The least logit that is as good as a value.
double LogitScores::logit_of(double value) const {
    const double least = origin_ + value * temperature_;
    const double below = least - (std::abs(origin_) + std::abs(least)) * 1e-14;  // products and sums are rounded
    return std::isnan(below) ? -infinity : below;
}

// The token of a block that has the block's largest noise.
void LogitScores::consider_lifted(int64_t block, const RowNoise& noise, BestList& best) const {
    const LargestNoise largest = noise.largest(block);
    if (largest.token < vocab_) {
        consider(largest.token, largest, noise, best);
    }
}

void LogitScores::consider(int64_t token, const LargestNoise& largest, const RowNoise& noise, BestList& best) const {
    best.add({noise.score(token, value(logit(token)), largest), token});
}

// Sets the tokens of a block apart that the block's largest noise would lift to the limit.
void LogitScores::collect(int64_t block, const RowNoise& noise, BestList& best) {
    const double limit = best.limit();
    if (!noise.any()) {
        for_logits_at_least(block, logit_of(limit), [&](int64_t token) { best.add({value(logit(token)), token}); });
        return;
    }
    uint32_t* first = tokens_.room(block_size);
    uint32_t* next = first;
    for_logits_at_least(block, logit_of(limit - noise.bound(block)),
                        [&](int64_t token) { *next++ = static_cast<uint32_t>(token); });
    tokens_.added(next - first);
}

// The least word of a token of a block that can reach the limit, unless it has the block's largest noise: its score is
// value - log(exp(-largest) - log(word)), so that exp(value - limit) must be at least -log(word) >= 1 - word.
uint32_t LogitScores::least_word(int64_t block, double limit) const {
    const double below = limit - value(lone_ ? maxima_[block] : mixed_maxima_[block]);
    if (!(below > 0)) {
        return 0;
    }
    const double exp_at_least = 1 + below * (1 + below * (1.0 / 2 + below * (1.0 / 6 + below * (1.0 / 24))));
    return static_cast<uint32_t>((1 - 1 / exp_at_least) * (0x1p32 - 2));
}

// Scores what was set apart, but for the tokens that have their block's largest noise.
void LogitScores::settle(const RowNoise& noise, BestList& best) {
    const uint32_t* words = tokens_.draw(noise.key());
    const uint32_t* ids = tokens_.ids();
    for (int64_t index = 0, count = tokens_.count(); index < count;) {
        const uint32_t block = ids[index] / uint32_t{block_size};
        const uint32_t least = least_word(block, best.limit());
        for (; index < count && ids[index] / uint32_t{block_size} == block; ++index) {
            if (words[index] >= least) {
                consider(ids[index], noise.largest(block), noise, best);
            }
        }
    }
    tokens_.clear();
}

// Takes the blocks of the best bounds, and scores a token or more of each.
void LogitScores::try_best_blocks(const RowNoise& noise, BestList& best) {
    candidates_.clear();
    for (const size_t tried = std::max(tried_blocks, best.count()); candidates_.size() < tried;) {
        const int64_t block = bounds_.pop(best.limit());
        if (block < 0) {
            break;
        }
        candidates_.push_back(block);
        if (noise.any()) {
            consider_lifted(block, noise, best);
        } else {
            const double most = lone_ ? maxima_[block] : mixed_maxima_[block];
            for_logits_at_least(block, most, [&](int64_t token) { best.add({value(logit(token)), token}); });
        }
    }
}

// The best score mostly is where some block's largest noise lies: those of the blocks that could have it set a limit
// which few blocks reach.
void LogitScores::race_blocks(const RowNoise& noise, BestList& best) {
    bounds_.start(maxima_, lone_ ? static_cast<float>(origin_) : 0.0f, temperature_, noise);
    try_best_blocks(noise, best);
    const size_t tried = candidates_.size();
    const double factor = 1 / temperature_;
    double limit = best.limit();
    bounds_.for_rest(limit, [&](int64_t block) {
        candidates_.push_back(block);
        const int64_t token = block * block_size + noise.argmax(block);
        if (noise.any() && token < vocab_ && (logit(token) - origin_) * factor + noise.bound(block) >= limit) {
            consider_lifted(block, noise, best);
            limit = best.limit();
        }
    });
    for (size_t index = 0; index < candidates_.size(); ++index) {
        if (index < tried || bounds_.reaches(candidates_[index], best.limit())) {
            collect(candidates_[index], noise, best);
        }
    }
    if (noise.any()) {
        settle(noise, best);
    }
}

void LogitScores::find(RowNoise& noise, BestList& best) {
    read(noise);
    if (origin_ > -infinity && plausibility_ > 0) {
        find_plausible();
        race_among(plausible_, noise, best);
    } else if (origin_ > -infinity) {
        race_blocks(noise, best);
    }
    if (best.list().empty()) {
        status_ |= status_no_token;
    }
}

void LogitScores::find_among(const std::vector<int64_t>& tokens, RowNoise& noise, BestList& best) {
    plausibility_ = 0;  // all of these are plausible
    race_among(tokens, noise, best);
}

void LogitScores::race_among(const std::vector<int64_t>& tokens, RowNoise& noise, BestList& best) {
    logits_.clear();
    for (const int64_t token : tokens) {
        logits_.push_back(logit(token));
    }
    if (logits_.empty()) {
        return;
    }
    origin_ = *std::max_element(logits_.begin(), logits_.end());
    int64_t block = -1;
    for (size_t index = 0; index < tokens.size(); ++index) {
        if (tokens[index] / block_size != block) {
            block = tokens[index] / block_size;
            if (index == 0 || tokens[index - 1] / tile_size != tokens[index] / tile_size) {
                noise.draw_tiles(tokens[index] / tile_size, tokens[index] / tile_size + 1);
            }
        }
        const double own = value(logits_[index]);
        if (own + noise.bound(block) >= best.limit()) {
            best.add({noise.score(tokens[index], own, noise.largest(block)), tokens[index]});
        }
    }
}

}  // namespace specens
