#include "parts/softmax.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <numeric>
#include <utility>

#include "parts/parallel.h"

namespace specens {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float lowest = std::numeric_limits<float>::lowest();
constexpr float largest_offset = 0x1p20f;
// Between these, products with logits keep their digits; up to the widest, Exp2 has room for factors of its own.
constexpr double smallest_scale = 0x1p-100, largest_scale = 0x1p100, widest_scale = 0x1p120;

}  // namespace

void Softmax::read(TileSource& source, double temperature, const FilterParameters& filter, ThresholdSearch& search,
                   bool roughly) {
    start(source, temperature);
    if (filter.any()) {
        if (factor_ != 1 || !read_groups() || !(std::abs(max_ * scale_) < largest_offset)) {
            source.repair(factor_);
            read_groups();
        }
        offset_ = alive() ? max_ * scale_ : 0.0f;
        apply(filter, search);
    } else {
        read_all(roughly);
    }
}

void Softmax::start(TileSource& source, double temperature) {
    source_ = &source;
    rough_ = false;
    const double scale = log2_e / temperature;
    factor_ = scale > largest_scale ? 0x1p64f : scale < smallest_scale ? 0x1p-64f : 1.0f;
    scale_ = static_cast<float>(std::clamp(scale / factor_, double{std::numeric_limits<float>::min()}, widest_scale));
    tile_max_.resize(source.tiles());
}

SliceSum Softmax::slice_sum() const {
    return alive() ? SliceSum{source_->original(max_), sum_ / std::exp2(exponent(max_))} : SliceSum{-infinity, 0};
}

void Softmax::keep(float* state) const {
    state[0] = source_->unchanged() ? offset_ : std::numeric_limits<float>::quiet_NaN();
    std::copy(tile_max_.begin(), tile_max_.end(), state + 1);
    std::copy(tile_sum_.begin(), tile_sum_.end(), state + 1 + source_->tiles());
}

void Softmax::resume(TileSource& source, double temperature, ThresholdSearch& search, const float* state, double mass,
                     float least) {
    if (!(mass > 0)) {
        start(source, temperature);
        std::fill(tile_max_.begin(), tile_max_.end(), -infinity);
        tile_sum_.assign(source.tiles(), 0.0f);
        max_ = -infinity;
        offset_ = 0;
    } else if (std::isnan(state[0])) {
        read(source, temperature, {}, search);
    } else {
        start(source, temperature);
        const float* sums = state + 1 + source.tiles();
        tile_max_.assign(state + 1, sums);
        tile_sum_.assign(sums, sums + source.tiles());
        max_ = *std::max_element(tile_max_.begin(), tile_max_.end());
        offset_ = state[0];
    }
    first_tile_ = 0;
    add_sums();
    sum_ = mass > 0 ? sum_ / mass : 1;
    if (mass > 0 && least > -infinity) {
        keep_from(least);
    }
}

// Leaves what a filter keeps; what masses are divided by stays.
void Softmax::keep_from(float least) {
    threshold_ = std::max(threshold_, static_cast<float>((least - source_->original(0)) * factor_));
    group_max_.resize((source_->vocab() + group_size - 1) / group_size);
    read_groups();
    tile_sum_.clear();
}

void Softmax::write_logits(int64_t tile, double* out) const {
    alignas(64) float scratch[tile_size];
    const float* logits = source_->tile(tile, scratch);
    std::transform(logits, logits + source_->width(tile), out, [&](float logit) { return source_->original(logit); });
}

void Softmax::write_kept(int64_t tile, double* out) const {
    std::fill_n(out, tile_size, -infinity);
    if (tile >= source_->tiles() || (filtered() && !has_mass(tile))) {
        return;
    }
    alignas(64) float scratch[tile_size];
    const float* logits = source_->tile(tile, scratch);
    const float least = filtered() ? threshold_ : -infinity;
    for (int64_t index = 0; index < source_->width(tile); ++index) {
        out[index] = logits[index] >= least ? source_->original(logits[index]) : -infinity;
    }
}

void Softmax::refine() {
    if (rough_) {
        read_all(false);
    }
}

void Softmax::read_all(bool roughly) {
    tile_sum_.resize(source_->tiles());
    const bool usable = factor_ == 1 && find_origin();
    rough_ = usable && roughly && read_rough_sums();
    if (!rough_ && !(usable && read_sums())) {
        source_->repair(factor_);
        first_tile_ = 0;
        origin_ = 0;
        read_sums();
    }
}

// The exponents' origin is the largest logit of the first tile that has a token, so that a row's sum is at least about
// 1. The tiles before it are not read again. False where one of these holds NaN.
bool Softmax::find_origin() {
    alignas(64) float scratch[tile_size];
    origin_ = 0;
    for (first_tile_ = 0; first_tile_ < source_->tiles(); ++first_tile_) {
        const int64_t tile = first_tile_;
        const TileScan seen = row_kernels().scan(source_->typed_tile(tile, scratch), source_->width(tile));
        if (seen.has_nan) {
            return false;
        }
        if (seen.max > -infinity) {
            origin_ = seen.max;
            break;
        }
        tile_max_[tile] = -infinity;
        tile_sum_[tile] = 0;
    }
    return true;
}

// Calls read(tile, logits, count), which gives the largest logit and whether all can be used, for every tile from the
// first on; false where some cannot.
template <typename Read>
bool Softmax::read_tiles(int64_t first, const Read& read) {
    std::atomic<bool> usable{true};
    for_tiles(source_->tiles() - first, source_->splittable(), [&](int64_t begin, int64_t end) {
        alignas(64) float scratch[tile_size];
        for (int64_t tile = first + begin; tile < first + end && usable.load(std::memory_order_relaxed); ++tile) {
            const auto [max, all_usable] = read(tile, source_->typed_tile(tile, scratch), source_->width(tile));
            tile_max_[tile] = max;
            if (!all_usable) {
                usable = false;
            }
        }
    });
    max_ = *std::max_element(tile_max_.begin(), tile_max_.end());
    return usable;
}

// Reads the row once; false where it holds NaN, +inf or a number too far above the origin, or where the origin is so
// large that its rounding would swamp the exponents.
bool Softmax::read_sums() {
    offset_ = origin_ * scale_;
    if (!(std::abs(offset_) < largest_offset)) {
        sum_ = 0;
        return false;
    }
    const bool usable = read_tiles(first_tile_, [&](int64_t tile, TypedLogits logits, int64_t count) {
        const TileSum seen = row_kernels().exp2_sum(logits, count, scale_, offset_);
        tile_sum_[tile] = seen.sum;
        return std::pair(seen.max, !std::isnan(seen.sum) && seen.max * scale_ - offset_ <= largest_exponent);
    });
    add_sums();
    return usable;
}

void Softmax::add_sums() {
    threshold_ = std::max((offset_ + smallest_exponent) / scale_, lowest);
    sum_ = 0;
    for (int64_t tile = first_tile_; tile < source_->tiles(); ++tile) {
        sum_ += has_mass(tile) ? tile_sum_[tile] : 0;
    }
}

// The same roughly; false where some number is not usual. The origin counts as the largest logit of all tiles: no more
// of it is asked than that it is finite.
bool Softmax::read_rough_sums() {
    offset_ = origin_ * scale_;
    if (!(std::abs(offset_) < largest_rough_offset)) {
        return false;
    }
    const bool usable = read_tiles(first_tile_, [&](int64_t tile, TypedLogits logits, int64_t count) {
        tile_sum_[tile] = row_kernels().rough_exp2_sum(logits, count, scale_, offset_);
        return std::pair(origin_, !std::isnan(tile_sum_[tile]));
    });
    sum_ = usable ? std::accumulate(tile_sum_.begin(), tile_sum_.end(), 0.0) : 0;
    return usable;
}

// Finds the largest logit of each group; false where there is NaN or +inf.
bool Softmax::read_groups() {
    group_max_.resize((source_->vocab() + group_size - 1) / group_size);
    return read_tiles(0, [&](int64_t tile, TypedLogits logits, int64_t count) {
        const TileScan seen = row_kernels().scan_groups(logits, count, group_max_.data() + tile * groups_per_tile);
        return std::pair(seen.max, !seen.has_nan && seen.max < infinity);
    });
}

// Finds the largest logit of each tile; false where there is NaN or +inf.
bool Softmax::read_tile_maxima() {
    return read_tiles(0, [](int64_t, TypedLogits logits, int64_t count) {
        const TileScan seen = row_kernels().scan(logits, count);
        return std::pair(seen.max, !seen.has_nan && seen.max < infinity);
    });
}

void Softmax::apply(const FilterParameters& filter, ThresholdSearch& search) {
    tile_sum_.clear();
    if (alive()) {
        const Kept kept = search.find(*this, filter);
        threshold_ = kept.threshold;
        sum_ = kept.mass;
    }
}

void Softmax::masses(const float* values, int64_t count, float* out) const {
    std::fill(out, out + count, 0.0f);
    row_kernels().exp2_add(values, count, scale_, offset_, lowest, 1.0f, out);
}

double Softmax::total_mass() const {
    alignas(64) float scratch[tile_size];
    double total = 0;
    for (int64_t tile = 0; tile < source_->tiles(); ++tile) {
        if (tile_max_[tile] > -infinity) {
            const TypedLogits logits = source_->typed_tile(tile, scratch);
            total += row_kernels().exp2_sum(logits, source_->width(tile), scale_, offset_).sum;
        }
    }
    return total;
}

float Softmax::value_of_mass(double mass) const {
    return static_cast<float>((std::max(std::log2(mass), double{smallest_exponent}) + offset_) / scale_);
}

float Softmax::scaled_value(float value, double share) const {
    return static_cast<float>(value + std::log2(share) / scale_);
}

void Softmax::read_maxima(TileSource& source) {
    source_ = &source;
    rough_ = false;
    tile_max_.resize(source.tiles());
    if (!read_tile_maxima()) {
        source.repair(1);
        read_tile_maxima();
    }
}

int64_t Softmax::most_likely() const {
    const int64_t tile = first_equal(tile_max_.data(), source_->tiles(), max_);
    alignas(64) float scratch[tile_size];
    return tile * tile_size + first_equal(source_->tile(tile, scratch), source_->width(tile), max_);
}

double Softmax::probability(int64_t token) const {
    if (token >= source_->vocab() || !alive()) {
        return 0;
    }
    const float logit = source_->logit(token);
    return logit >= threshold_ || !filtered() ? std::exp2(exponent(logit)) / sum_ : 0.0;
}

Bounds Softmax::bounds(int64_t token) const {
    const double share = probability(token);
    return rough_ ? Bounds{share / rough_rounding, share * (rough_excess * rough_rounding)} : Bounds{share, share};
}

double Softmax::logprob(int64_t token) const {
    if (token >= source_->vocab() || !alive()) {
        return -infinity;
    }
    const float logit = source_->logit(token);
    return logit >= threshold_ || !filtered() ? std::min((exponent(logit) - std::log2(sum_)) / log2_e, 0.0) : -infinity;
}

void Softmax::write_logprobs(int64_t tile, float* out) const {
    if (tile >= source_->tiles()) {
        return;
    }
    alignas(64) float scratch[tile_size];
    const float* logits = source_->tile(tile, scratch);
    const int64_t count = source_->width(tile);
    const double factor = scale_ / log2_e;
    const double shift = (offset_ + std::log2(sum_)) / log2_e;
    for (int64_t i = 0; i < count; ++i) {
        out[i] = static_cast<float>(std::min(logits[i] * factor - shift, 0.0));
    }
    if (filtered()) {
        row_kernels().replace_below(logits, count, threshold_, -infinity, out);
    }
}

double Softmax::tile_bound(int64_t tile) const {
    return has_mass(tile) ? std::exp2(exponent(tile_max_[tile])) / sum_ : 0.0;
}

double Softmax::tile_mass(int64_t tile) const {
    if (!has_mass(tile)) {
        return 0;
    }
    if (!filtered()) {
        return tile_sum_[tile] / sum_;
    }
    alignas(64) float scratch[tile_size];
    const float* logits = source_->tile(tile, scratch);
    double total = 0;
    for_runs(tile, [&](int64_t first, int64_t count) {
        alignas(64) float masses[group_size] = {};
        row_kernels().exp2_add(logits + first, count, scale_, offset_, threshold_, 1.0f, masses);
        total += row_kernels().clamp_sum(masses, count);
    });
    return total / sum_;
}

template <typename Run>
void Softmax::for_runs(int64_t tile, const Run& run) const {
    const int64_t width = source_->width(tile);
    if (!filtered()) {
        run(int64_t{0}, width);
        return;
    }
    const float* group_max = group_max_.data() + tile * groups_per_tile;
    for (int64_t first = 0; first < width; first += group_size) {
        if (group_max[first / group_size] >= threshold_) {
            run(first, std::min(group_size, width - first));
        }
    }
}

ScaledPowers Softmax::powers(double share) const {
    return {scale_, offset_, filtered() ? threshold_ : -infinity, static_cast<float>(share / sum_)};
}

bool Softmax::shares_tile(const Softmax& other, int64_t tile) const {
    return has_mass(tile) && other.has_mass(tile) && source_->width(tile) == other.source_->width(tile);
}

double Softmax::excess_of(const Softmax& other, double share, int64_t tile, float* out) const {
    alignas(64) float scratch[tile_size];
    alignas(64) float other_scratch[tile_size];
    const float* logits = source_->tile(tile, scratch);
    const float* other_logits = other.source_->tile(tile, other_scratch);
    if (out != nullptr) {
        std::fill(filtered() ? out : out + source_->width(tile), out + tile_size, 0.0f);
    }
    double total = 0;
    for_runs(tile, [&](int64_t first, int64_t count) {
        total += row_kernels().excess(logits + first, powers(share), other_logits + first, other.powers(1), count,
                                      out != nullptr ? out + first : nullptr);
    });
    return total;
}

void Softmax::add_tile(int64_t tile, double factor, float* out) const {
    if (has_mass(tile)) {
        alignas(64) float scratch[tile_size];
        const float* logits = source_->tile(tile, scratch);
        for_runs(tile, [&](int64_t first, int64_t count) {
            row_kernels().exp2_add(logits + first, count, scale_, offset_, threshold_,
                                   static_cast<float>(factor / sum_), out + first);
        });
    }
}

double Softmax::logprob_of(float value) const { return (exponent(value) - std::log2(sum_)) / log2_e; }

float Softmax::least_value_of(double logprob) const {
    const double value = (logprob * log2_e + std::log2(sum_) + offset_) / scale_;
    return static_cast<float>(value - std::abs(value) * 0x1p-22 - rounding() / scale_);
}

double Softmax::rounding() const {
    constexpr double of_sums = 4e-6;
    constexpr double hopeless = 128;  // so many powers of two below the largest
    return of_sums + (std::abs(offset_) + std::abs(max_ * scale_) + hopeless) * 0x1p-22;
}

bool Softmax::keeps(int64_t token) const { return !filtered() || source_->logit(token) >= threshold_; }

void Softmax::kept_tokens(std::vector<int64_t>& out) const {
    alignas(64) float scratch[tile_size];
    for (int64_t tile = 0; tile < source_->tiles(); ++tile) {
        if (has_mass(tile)) {
            const float* logits = source_->tile(tile, scratch);
            for_runs(tile, [&](int64_t first, int64_t count) {
                for (int64_t index = first; index < first + count; ++index) {
                    if (logits[index] >= threshold_) {
                        out.push_back(tile * tile_size + index);
                    }
                }
            });
        }
    }
}

}  // namespace specens
