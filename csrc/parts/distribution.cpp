#include "parts/distribution.h"

#include <algorithm>
#include <atomic>

#include "parts/parallel.h"

namespace specens {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float float_max = std::numeric_limits<float>::max();
constexpr float lowest = std::numeric_limits<float>::lowest();
constexpr float largest_offset = 0x1p20f;
constexpr double largest_scale = 0x1p120;  // leaves room for factors inside Exp2

int64_t first_equal(const float* values, int64_t count, float value) {
    return std::find(values, values + count, value) - values;
}

}  // namespace

void MemberSource::reset(const LogitRow& row) {
    row_ = row;
    vocab_ = row.vocab;
    status_ = status_ok;
    repaired_ = false;
    shift_ = 0;
}

const float* MemberSource::widened(int64_t tile, float* scratch) const {
    const int64_t first = tile * tile_size;
    if (row_.type == LogitType::float32) {
        return static_cast<const float*>(row_.data) + first;
    }
    const auto* half = static_cast<const uint16_t*>(row_.data) + first;
    const RowKernels& kernels = row_kernels();
    (row_.type == LogitType::bfloat16 ? kernels.widen_bf16 : kernels.widen_fp16)(half, width(tile), scratch);
    return scratch;
}

const float* MemberSource::tile(int64_t tile, float* scratch) {
    const float* logits = widened(tile, scratch);
    if (!repaired_) {
        return logits;
    }
    row_kernels().clean(logits, width(tile), shift_, scratch);
    return scratch;
}

const float* MemberSource::usable_tile(int64_t tile, float* scratch, float& max) {
    const float* logits = this->tile(tile, scratch);
    TileScan seen = row_kernels().scan(logits, width(tile));
    if (seen.has_nan || seen.max == infinity) {
        status_ |= (seen.has_nan ? status_nan_logits : 0) | (seen.max == infinity ? status_infinite_logits : 0);
        repaired_ = true;
        return usable_tile(tile, scratch, max);
    }
    max = seen.max;
    return logits;
}

void MemberSource::repair() {
    alignas(64) float scratch[tile_size];
    float largest = -infinity;
    for (int64_t tile = 0; tile < tiles(); ++tile) {
        float max;
        usable_tile(tile, scratch, max);
        largest = std::max(largest, max);
    }
    repaired_ = true;
    shift_ = largest > -infinity ? largest : 0;
}

float MemberSource::logit(int64_t token) const {
    float value;
    if (row_.type == LogitType::float32) {
        value = static_cast<const float*>(row_.data)[token];
    } else {
        const auto* half = static_cast<const uint16_t*>(row_.data) + token;
        (row_.type == LogitType::bfloat16 ? row_kernels().widen_bf16 : row_kernels().widen_fp16)(half, 1, &value);
    }
    if (repaired_) {
        row_kernels().clean(&value, 1, shift_, &value);
    }
    return value;
}

void MixedSource::reset(const std::vector<LogitRow>& rows, const float* weights, double plausibility) {
    members_.clear();
    weights_.clear();
    status_ = status_ok;
    shift_ = 0;
    vocab_ = 0;
    for (size_t member = 0; member < rows.size(); ++member) {
        if (weights[member] != 0) {
            members_.emplace_back().reset(rows[member]);
            weights_.push_back(weights[member]);
        }
        vocab_ = std::max(vocab_, rows[member].vocab);
    }
    for (const MemberSource& member : members_) {
        vocab_ = std::min(vocab_, member.vocab());  // beyond it a member's logit counts as -inf
    }
    threshold_ = -infinity;
    if (plausibility > 0) {
        plausible_.reset(rows[0]);
        alignas(64) float scratch[tile_size];
        float largest = -infinity;
        for (int64_t tile = 0; tile < plausible_.tiles(); ++tile) {
            float max;
            plausible_.usable_tile(tile, scratch, max);
            largest = std::max(largest, max);
        }
        threshold_ = static_cast<float>(largest + std::log(plausibility));
    }
}

const float* MixedSource::tile(int64_t tile, float* scratch) {
    alignas(64) float member_scratch[tile_size];
    const RowKernels& kernels = row_kernels();
    const int64_t count = width(tile);
    std::fill(scratch, scratch + count, 0.0f);
    for (size_t member = 0; member < members_.size(); ++member) {
        float unused;
        const float* logits = members_[member].usable_tile(tile, member_scratch, unused);
        kernels.weight_add(logits, count, weights_[member], scratch);
        status_ |= members_[member].status();
    }
    if (threshold_ > -infinity) {
        kernels.replace_below(plausible_.tile(tile, member_scratch), count, threshold_, -infinity, scratch);
    }
    if (shift_ != 0) {
        kernels.clean(scratch, count, shift_, scratch);
    }
    return scratch;
}

float MixedSource::logit(int64_t token) const {
    float total = 0;
    for (size_t member = 0; member < members_.size(); ++member) {
        const float logit = members_[member].logit(token);
        row_kernels().weight_add(&logit, 1, weights_[member], &total);
    }
    return threshold_ > -infinity && plausible_.logit(token) < threshold_ ? -infinity : total - shift_;
}

void MixedSource::repair() {
    alignas(64) float scratch[tile_size];
    float largest = -infinity;
    for (int64_t index = 0; index < tiles(); ++index) {
        largest = std::max(largest, row_kernels().scan(tile(index, scratch), width(index)).max);
    }
    shift_ = largest > -infinity ? shift_ + largest : shift_;
}

void Softmax::read(TileSource& source, double temperature, const FilterParameters& filter) {
    source_ = &source;
    scale_ = static_cast<float>(std::min(log2_e / temperature, largest_scale));
    tile_max_.resize(source.tiles());
    if (filter.any()) {
        if (!scan_groups() || !(std::abs(max_ * scale_) < largest_offset)) {
            source.repair();
            scan_groups();
        }
        offset_ = alive() ? max_ * scale_ : 0.0f;
        apply(filter);
        return;
    }
    alignas(64) float scratch[tile_size];
    tile_sum_.resize(source.tiles());
    const float first_max = row_kernels().scan(source.tile(0, scratch), source.width(0)).max;
    if (!read_sums(first_max > -infinity ? first_max * scale_ : 0.0f)) {
        source.repair();
        read_sums(0.0f);
    }
}

// Reads the row once; false where it holds NaN, +inf or a number too far above the offset, or where the offset is so
// large that its rounding would swamp the exponents.
bool Softmax::read_sums(float offset) {
    if (!(std::abs(offset) < largest_offset)) {
        return false;
    }
    offset_ = offset;
    threshold_ = std::max((offset + smallest_exponent) / scale_, lowest);
    std::atomic<bool> usable{true};
    for_tiles(source_->tiles(), source_->splittable(), [&](int64_t begin, int64_t end) {
        alignas(64) float scratch[tile_size];
        for (int64_t tile = begin; tile < end && usable.load(std::memory_order_relaxed); ++tile) {
            const TileSum seen =
                row_kernels().exp2_sum(source_->tile(tile, scratch), source_->width(tile), scale_, offset_);
            if (std::isnan(seen.sum) || !(seen.max * scale_ - offset_ <= largest_exponent)) {
                usable = false;
            }
            tile_sum_[tile] = seen.sum;
            tile_max_[tile] = seen.max;
        }
    });
    if (!usable) {
        return false;
    }
    max_ = -infinity;
    sum_ = 0;
    for (int64_t tile = 0; tile < source_->tiles(); ++tile) {
        max_ = std::max(max_, tile_max_[tile]);
        sum_ += has_mass(tile) ? tile_sum_[tile] : 0;
    }
    return sum_ > 0 || max_ == -infinity;
}

// Finds the largest logit of each group; false where there is NaN or +inf.
bool Softmax::scan_groups() {
    group_max_.resize((source_->vocab() + group_size - 1) / group_size);
    std::atomic<bool> usable{true};
    for_tiles(source_->tiles(), source_->splittable(), [&](int64_t begin, int64_t end) {
        alignas(64) float scratch[tile_size];
        for (int64_t tile = begin; tile < end && usable.load(std::memory_order_relaxed); ++tile) {
            const TileScan seen = row_kernels().scan_groups(source_->tile(tile, scratch), source_->width(tile),
                                                            group_max_.data() + tile * groups_per_tile);
            if (seen.has_nan || seen.max == infinity) {
                usable = false;
            }
            tile_max_[tile] = seen.max;
        }
    });
    max_ = *std::max_element(tile_max_.begin(), tile_max_.end());
    return usable;
}

void Softmax::apply(const FilterParameters& filter) {
    tile_sum_.clear();
    if (alive()) {
        const Kept kept = search_.find(*this, filter);
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
            total += row_kernels().exp2_sum(source_->tile(tile, scratch), source_->width(tile), scale_, offset_).sum;
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
    tile_max_.resize(source.tiles());
    alignas(64) float scratch[tile_size];
    max_ = -infinity;
    for (int64_t tile = 0; tile < source.tiles(); ++tile) {
        const TileScan seen = row_kernels().scan(source.tile(tile, scratch), source.width(tile));
        if (seen.has_nan || seen.max == infinity) {
            source.repair();
            return read_maxima(source);
        }
        tile_max_[tile] = seen.max;
        max_ = std::max(max_, seen.max);
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

double Softmax::logprob(int64_t token) const {
    if (token >= source_->vocab() || !alive()) {
        return -infinity;
    }
    const float logit = source_->logit(token);
    return logit >= threshold_ || !filtered() ? (exponent(logit) - std::log2(sum_)) / log2_e : -infinity;
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
        out[i] = static_cast<float>(logits[i] * factor - shift);
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
    alignas(64) float masses[tile_size] = {};
    add_tile(tile, 1.0, masses);
    return row_kernels().clamp_sum(masses, source_->width(tile));
}

void Softmax::add_tile(int64_t tile, double factor, float* out) const {
    if (has_mass(tile)) {
        alignas(64) float scratch[tile_size];
        const float* logits = source_->tile(tile, scratch);
        row_kernels().exp2_add(logits, source_->width(tile), scale_, offset_, threshold_,
                               static_cast<float>(factor / sum_), out);
    }
}

TileSource& TargetRow::source(size_t index) {
    if (kind_ == EnsembleKind::logit_mixture) {
        return mixed_;
    }
    return members_[index];
}

void TargetRow::read(const std::vector<LogitRow>& rows, const EnsembleParameters& parameters, bool probabilities) {
    const bool greedy = parameters.temperature == 0;
    kind_ = parameters.kind;
    temperature_ = greedy ? 1 : parameters.temperature;
    const bool mixture = kind_ == EnsembleKind::mixture;
    const FilterParameters filter = greedy ? FilterParameters{} : parameters.filter;
    filtered_ = mixture && !parameters.filter_members && filter.any();
    member_filter_ = filtered_ ? FilterParameters{} : filter;
    status_ = status_ok;
    vocab_ = 0;
    members_.resize(rows.size());
    for (size_t member = 0; member < rows.size(); ++member) {
        members_[member].reset(rows[member]);
        vocab_ = std::max(vocab_, rows[member].vocab);
    }
    if (kind_ == EnsembleKind::logit_mixture) {
        mixed_.reset(rows, parameters.weights, parameters.plausibility);
    }
    shares_.assign(mixture ? rows.size() : 1, 0.0);
    softmaxes_.resize(shares_.size());
    double total = 0;
    bool dead_member = false;
    for (size_t index = 0; index < shares_.size(); ++index) {
        const double weight = mixture ? parameters.weights[index] : 1.0;
        if (weight == 0) {
            continue;
        }
        if (mixture || !greedy || probabilities) {
            softmaxes_[index].read(source(index), temperature_, member_filter_);
        } else {
            softmaxes_[index].read_maxima(source(index));
        }
        status_ |= source(index).status();
        dead_member |= !softmaxes_[index].alive();
        shares_[index] = softmaxes_[index].alive() ? weight : 0;
        total += shares_[index];
    }
    alive_ = total > 0;
    for (double& share : shares_) {
        share = alive_ ? share / total : 0;
    }
    status_ |= !alive_ ? status_no_token : dead_member ? status_member_without_token : 0;
    if (filtered_ && alive_) {
        filter_mixture(filter);
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

double TargetRow::logprob(int64_t token) const {
    if (kind_ != EnsembleKind::mixture) {
        return softmaxes_[0].logprob(token);
    }
    if (filtered_) {
        return std::log(probability(token));
    }
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
    return total > 0 ? largest + std::log(total) : -infinity;
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
        out[i] = masses[i] > exact ? std::log(masses[i]) : static_cast<float>(logprob(first + i));
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

int64_t first_exceeding(const float* masses, int64_t count, double target) {
    constexpr int64_t group = 16;
    double before = 0;
    int64_t last = -1;
    for (int64_t first = 0; first < count; first += group) {
        const int64_t end = std::min(first + group, count);
        double sums[4] = {};
        for (int64_t i = first; i < end; ++i) {
            sums[i % 4] += masses[i];
        }
        const double sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
        if (sum > 0) {
            double running = before;
            for (int64_t i = first; i < end && before + sum > target; ++i) {
                running += masses[i];
                if (masses[i] > 0 && running > target) {
                    return i;
                }
            }
            for (int64_t i = first; i < end; ++i) {
                last = masses[i] > 0 ? i : last;
            }
        }
        before += sum;
    }
    return last;
}

}  // namespace specens
