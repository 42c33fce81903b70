#include "parts/target_row.h"

#include <algorithm>
#include <cmath>

namespace specens {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

}  // namespace

TileSource& TargetRow::source(size_t index) {
    if (kind_ == EnsembleKind::logit_mixture) {
        return mixed_;
    }
    return members_[index];
}

void TargetRow::reserve(const Sizes& most) {
    reserve_all(most.members, members_, shares_);
    reserve_all(most.blocks(), group_max_);
    softmaxes_.resize(std::max<size_t>(softmaxes_.size(), most.members));
    std::ranges::for_each(softmaxes_, [&](Softmax& own) { own.reserve(most); });
    mixed_.reserve(most);
    search_.reserve(most);
}

void TargetRow::start(const std::vector<LogitRow>& rows, const EnsembleParameters& parameters) {
    kind_ = parameters.kind;
    temperature_ = parameters.temperature == 0 ? 1 : parameters.temperature;
    status_ = status_ok;
    filtered_ = false;
    member_filter_ = {};
    vocab_ = 0;
    members_.resize(rows.size());
    for (size_t member = 0; member < rows.size(); ++member) {
        members_[member].reset(rows[member]);
        vocab_ = std::max(vocab_, rows[member].vocab);
    }
    if (kind_ == EnsembleKind::logit_mixture) {
        mixed_.reset(rows, parameters.weights, parameters.plausibility);
    }
    shares_.assign(kind_ == EnsembleKind::mixture ? rows.size() : 1, 0.0);
    softmaxes_.resize(std::max(softmaxes_.size(), shares_.size()));
}

void TargetRow::resume(const std::vector<LogitRow>& rows, const EnsembleParameters& parameters, const float* states,
                       int64_t state_size, const double* masses, const float* least) {
    start(rows, parameters);
    double total = 0;
    for (size_t index = 0; index < shares_.size(); ++index) {
        const double weight = kind_ == EnsembleKind::mixture ? parameters.weights[index] : 1.0;
        shares_[index] = masses[index] >= 0 ? weight : 0;
        total += shares_[index];
        if (shares_[index] > 0) {
            softmaxes_[index].resume(source(index), temperature_, search_, states + index * state_size, masses[index],
                                     least != nullptr ? least[index] : -infinity);
        }
    }
    divide_shares(total);
}

void TargetRow::divide_shares(double total) {
    alive_ = total > 0;
    for (double& share : shares_) {
        share = alive_ ? share / total : 0;
    }
}

void TargetRow::read(const std::vector<LogitRow>& rows, const EnsembleParameters& parameters, bool probabilities,
                     bool roughly) {
    start(rows, parameters);
    const bool greedy = parameters.temperature == 0;
    const bool mixture = kind_ == EnsembleKind::mixture;
    const FilterParameters filter = greedy ? FilterParameters{} : parameters.filter;
    filtered_ = mixture && !parameters.filter_members && filter.any();
    member_filter_ = filtered_ ? FilterParameters{} : filter;
    double total = 0;
    bool dead_member = false;
    for (size_t index = 0; index < shares_.size(); ++index) {
        const double weight = mixture ? parameters.weights[index] : 1.0;
        if (weight == 0) {
            continue;
        }
        if (mixture || !greedy || probabilities) {
            softmaxes_[index].read(source(index), temperature_, member_filter_, search_, roughly && !filtered_);
        } else {
            softmaxes_[index].read_maxima(source(index));
        }
        status_ |= source(index).status();
        dead_member |= !softmaxes_[index].alive();
        shares_[index] = softmaxes_[index].alive() ? weight : 0;
        total += shares_[index];
    }
    divide_shares(total);
    status_ |= !alive_ ? status_no_token : dead_member ? status_member_without_token : 0;
    filtered_ = filtered_ && alive_;
    if (filtered_) {
        filter_mixture(filter);
    }
}

void TargetRow::refine() {
    for (size_t index = 0; index < shares_.size(); ++index) {
        if (shares_[index] > 0) {
            softmaxes_[index].refine();
        }
    }
}

void TargetRow::filter_mixture(const FilterParameters& filter) {
    alignas(64) float scratch[tile_size];
    group_max_.resize(tiles() * groups_per_tile);
    for (int64_t tile = 0; tile < tiles(); ++tile) {
        row_kernels().scan_groups(values(tile, scratch), tile_size, group_max_.data() + tile * groups_per_tile);
    }
    kept_ = search_.find(*this, filter);
}

const float* TargetRow::values(int64_t tile, float* scratch) const {
    mix_tile(tile, 1, scratch);
    return scratch;
}

void TargetRow::masses(const float* values, int64_t count, float* out) const { std::copy(values, values + count, out); }

int64_t TargetRow::most_likely() const {
    return kind_ == EnsembleKind::mixture ? most_likely_of_mixture() : softmaxes_[0].most_likely();
}

int64_t TargetRow::most_likely_of_mixture() const {
    alignas(64) float masses[tile_size];
    float best = -1;
    int64_t token = -1;
    for (int64_t tile = 0; tile < tiles(); ++tile) {
        double bound = 0;
        for (size_t index = 0; index < shares_.size(); ++index) {
            bound += shares_[index] > 0 ? shares_[index] * softmaxes_[index].tile_bound(tile) : 0;
        }
        if (bound * (1 + 1e-5) < best) {  // the margin is wider than what rounding adds to a float mass
            continue;
        }
        mix_tile(tile, 1, masses);
        const float max = row_kernels().scan(masses, tile_size).max;
        if (max > best) {
            best = max;
            token = tile * tile_size + first_equal(masses, tile_size, max);
        }
    }
    return token;
}

double TargetRow::probability(int64_t token) const {
    if (filtered_) {
        alignas(64) float masses[tile_size];
        write_tile(token / tile_size, masses);
        return masses[token % tile_size];
    }
    double total = 0;
    for (size_t index = 0; index < shares_.size(); ++index) {
        total += shares_[index] > 0 ? shares_[index] * softmaxes_[index].probability(token) : 0;
    }
    return total;
}

Bounds TargetRow::bounds(int64_t token) const {
    if (filtered_) {
        const double exact = probability(token);
        return {exact, exact};
    }
    Bounds total{0, 0};
    for (size_t index = 0; index < shares_.size(); ++index) {
        if (shares_[index] > 0) {
            const Bounds own = softmaxes_[index].bounds(token);
            total = {total.low + shares_[index] * own.low, total.high + shares_[index] * own.high};
        }
    }
    return total;
}

double TargetRow::logprob(int64_t token) const {
    if (kind_ != EnsembleKind::mixture) {
        return softmaxes_[0].logprob(token);
    }
    return std::min(filtered_ ? std::log(probability(token)) : mixed_logprob(token), 0.0);
}

double TargetRow::mixed_logprob(int64_t token) const {
    double largest = -infinity;
    double total = 0;  // relative to the largest: small probabilities underflow
    for (size_t index = 0; index < shares_.size(); ++index) {
        const double own = shares_[index] > 0 ? std::log(shares_[index]) + softmaxes_[index].logprob(token) : -infinity;
        const double bound = std::max(largest, own);
        if (bound > -infinity) {
            total = total * std::exp(largest - bound) + std::exp(own - bound);
            largest = bound;
        }
    }
    return total > 0 ? std::min(largest + std::log(total), 0.0) : -infinity;
}

void TargetRow::write_logprobs(int64_t tile, float* out) const {
    const int64_t first = tile * tile_size;
    const int64_t count = std::min(tile_size, vocab_ - first);
    if (kind_ != EnsembleKind::mixture) {
        std::fill(out, out + count, -infinity);
        softmaxes_[0].write_logprobs(tile, out);
        return;
    }
    constexpr float exact = 1e-30f;  // smaller float masses have lost digits, or all of them
    alignas(64) float masses[tile_size];
    write_tile(tile, masses);
    for (int64_t i = 0; i < count; ++i) {
        out[i] = masses[i] > exact ? std::min(std::log(masses[i]), 0.0f) : static_cast<float>(logprob(first + i));
    }
}

double TargetRow::tile_mass(int64_t tile) const {
    if (filtered_) {
        const float* first = group_max_.data() + tile * groups_per_tile;
        if (*std::max_element(first, first + groups_per_tile) < kept_.threshold) {
            return 0;
        }
        alignas(64) float masses[tile_size];
        write_tile(tile, masses);
        return row_kernels().clamp_sum(masses, tile_size);
    }
    double total = 0;
    for (size_t index = 0; index < shares_.size(); ++index) {
        total += shares_[index] > 0 ? shares_[index] * softmaxes_[index].tile_mass(tile) : 0;
    }
    return total;
}

void TargetRow::mix_tile(int64_t tile, double share, float* out) const {
    std::fill(out, out + tile_size, 0.0f);
    for (size_t index = 0; index < shares_.size(); ++index) {
        if (shares_[index] > 0) {
            softmaxes_[index].add_tile(tile, share * shares_[index], out);
        }
    }
}

void TargetRow::write_tile(int64_t tile, float* out, double share) const {
    if (!filtered_) {
        mix_tile(tile, share, out);
        return;
    }
    mix_tile(tile, 1, out);
    row_kernels().replace_below(out, tile_size, kept_.threshold, 0.0f, out);
    const auto factor = static_cast<float>(share / kept_.mass);
    for (int64_t index = 0; index < tile_size; ++index) {
        out[index] *= factor;
    }
}

double TargetRow::entropy() const {
    alignas(64) float masses[tile_size];
    double total = 0;
    for (int64_t tile = 0; tile < tiles(); ++tile) {
        if (tile_mass(tile) > 0) {
            write_tile(tile, masses);
            total += row_kernels().log2_sum(masses, tile_size);
        }
    }
    return -total / log2_e;
}

const Softmax* TargetRow::member_softmax(int64_t member, double temperature, const FilterParameters& filter,
                                         int32_t& status) const {
    const bool read = kind_ == EnsembleKind::mixture ? shares_[member] > 0 : kind_ == EnsembleKind::single;
    if (!read || temperature != temperature_ || !(filter == member_filter_)) {
        return nullptr;
    }
    status = members_[member].status();
    return &softmaxes_[member];
}

}  // namespace specens
