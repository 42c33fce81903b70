#include "parts/sources.h"

#include <cmath>

namespace specens {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

}  // namespace

void MemberSource::reset(const LogitRow& row) {
    row_ = row;
    vocab_ = row.vocab;
    status_ = status_ok;
    repaired_ = false;
    shift_ = 0;
    factor_ = 1;
}

const float* MemberSource::processed(int64_t tile, float* scratch) const {
    const int64_t first = tile * tile_size;
    if (row_.type == LogitType::float32) {
        const float* logits = static_cast<const float*>(row_.data) + first;
        if (!edited(tile)) {
            return logits;
        }
        std::copy(logits, logits + width(tile), scratch);
    } else {
        const auto* half = static_cast<const uint16_t*>(row_.data) + first;
        const RowKernels& kernels = row_kernels();
        (row_.type == LogitType::bfloat16 ? kernels.widen_bf16 : kernels.widen_fp16)(half, width(tile), scratch);
    }
    if (edited(tile)) {
        row_.edits->apply_tile(tile, width(tile), scratch);
    }
    return scratch;
}

const float* MemberSource::tile(int64_t tile, float* scratch) {
    const float* logits = processed(tile, scratch);
    if (!repaired_) {
        return logits;
    }
    row_kernels().clean(logits, width(tile), shift_, factor_, scratch);
    return scratch;
}

TypedLogits MemberSource::typed_tile(int64_t tile, float* scratch) {
    if (repaired_ || edited(tile)) {
        return this->tile(tile, scratch);
    }
    const int64_t element_size = row_.type == LogitType::float32 ? sizeof(float) : sizeof(uint16_t);
    return {static_cast<const char*>(row_.data) + tile * tile_size * element_size, row_.type};
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

float MemberSource::largest_from(int64_t first) {
    alignas(64) float scratch[tile_size];
    float largest = -infinity;
    for (int64_t tile = first; tile < tiles(); ++tile) {
        float max;
        usable_tile(tile, scratch, max);
        largest = std::max(largest, max);
    }
    return largest;
}

void MemberSource::repair(float factor) {
    const float largest = largest_from(0);
    repaired_ = true;
    shift_ = largest > -infinity ? largest : 0;
    factor_ = factor;
}

float MemberSource::logit(int64_t token) const {
    float value;
    if (row_.type == LogitType::float32) {
        value = static_cast<const float*>(row_.data)[token];
    } else {
        const auto* half = static_cast<const uint16_t*>(row_.data) + token;
        (row_.type == LogitType::bfloat16 ? row_kernels().widen_bf16 : row_kernels().widen_fp16)(half, 1, &value);
    }
    if (row_.edits != nullptr) {
        value = static_cast<float>(row_.edits->apply(token, value));
    }
    if (repaired_) {
        row_kernels().clean(&value, 1, shift_, factor_, &value);
    }
    return value;
}

void MixedSource::reset(const std::vector<LogitRow>& rows, const Weights& weights, double plausibility) {
    members_.clear();
    weights_.clear();
    status_ = status_ok;
    shift_ = 0;
    factor_ = 1;
    vocab_ = 0;
    for (size_t member = 0; member < rows.size(); ++member) {
        if (weights[member] != 0) {
            members_.emplace_back().reset(rows[member]);
            weights_.push_back(static_cast<float>(weights[member]));
        }
        vocab_ = std::max(vocab_, rows[member].vocab);
    }
    threshold_ = -infinity;
    if (plausibility > 0) {
        plausible_.reset(rows[0]);
        threshold_ = static_cast<float>(plausible_.largest_from(0) + std::log(plausibility));
    }
    // beyond the smallest of the vocabularies a logit counts as -inf
    if (threshold_ > -infinity) {
        vocab_ = std::min(vocab_, plausible_.vocab());
    }
    for (const MemberSource& member : members_) {
        vocab_ = std::min(vocab_, member.vocab());
    }
    for (MemberSource& member : members_) {
        member.largest_from(tile_count(vocab_));  // for its status alone
        status_ |= member.status();
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
    if (shift_ != 0 || factor_ != 1) {
        kernels.clean(scratch, count, shift_, factor_, scratch);
    }
    return scratch;
}

float MixedSource::logit(int64_t token) const {
    float total = 0;
    for (size_t member = 0; member < members_.size(); ++member) {
        const float logit = members_[member].logit(token);
        row_kernels().weight_add(&logit, 1, weights_[member], &total);
    }
    return threshold_ > -infinity && plausible_.logit(token) < threshold_ ? -infinity : (total - shift_) * factor_;
}

void MixedSource::repair(float factor) {
    alignas(64) float scratch[tile_size];
    float largest = -infinity;
    for (int64_t index = 0; index < tiles(); ++index) {
        largest = std::max(largest, row_kernels().scan(tile(index, scratch), width(index)).max);
    }
    shift_ = largest > -infinity ? largest : 0;
    factor_ = factor;
}

}  // namespace specens
