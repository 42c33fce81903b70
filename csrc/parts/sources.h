// Rows of logits, read tile by tile: of one member, or mixed from several.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "parts/row_edits.h"
#include "parts/rows.h"
#include "parts/scratch.h"
#include "parts/status.h"

namespace specens {

// One member's logits at one position.
struct LogitRow {
    const void* data;
    LogitType type;
    int64_t vocab;
    const RowEdits* edits = nullptr;  // what processing changes in them
};

// One weight a member: of a tensor, which counts as float32, or of a list.
struct Weights {
    const float* rounded = nullptr;
    const double* exact = nullptr;
    double operator[](size_t member) const { return rounded != nullptr ? double{rounded[member]} : exact[member]; }
};

// Float logits after processing, tile by tile. As they are at first; once repaired, without NaN, +inf or numbers too
// large to scale.
class TileSource {
  public:
    virtual ~TileSource() = default;
    int64_t vocab() const { return vocab_; }
    int64_t tiles() const { return tile_count(vocab_); }
    int64_t width(int64_t tile) const { return std::min(tile_size, vocab_ - tile * tile_size); }
    int32_t status() const { return status_; }
    // Whether threads may read different tiles at once.
    virtual bool splittable() const = 0;
    // A tile's logits, in `scratch` or in place.
    virtual const float* tile(int64_t tile, float* scratch) = 0;
    // The same numbers, of the type in which they lie in memory where nothing changes them.
    virtual TypedLogits typed_tile(int64_t tile, float* scratch) { return this->tile(tile, scratch); }
    // One token's logit, as `tile` gives it.
    virtual float logit(int64_t token) const = 0;
    // From now on NaN counts as -inf, +inf as the largest float, and the row's largest logit as 0; then all are
    // multiplied by a power of two. Once a row.
    virtual void repair(float factor) = 0;
    // A number of a tile as the logit that it stands for.
    double original(float value) const { return shift_ + double{value} / factor_; }
    // Whether every number is its logit.
    bool unchanged() const { return status_ == status_ok && shift_ == 0 && factor_ == 1; }

  protected:
    int64_t vocab_ = 0;
    int32_t status_ = status_ok;
    float shift_ = 0, factor_ = 1;
};

// The logits of one member.
class MemberSource final : public TileSource {
  public:
    void reset(const LogitRow& row);
    bool splittable() const override { return true; }
    const float* tile(int64_t tile, float* scratch) override;
    TypedLogits typed_tile(int64_t tile, float* scratch) override;
    float logit(int64_t token) const override;
    void repair(float factor) override;
    // As `tile`, with its largest logit; repairs numbers that cannot be used, but does not shift the others.
    const float* usable_tile(int64_t tile, float* scratch, float& max);
    // The largest usable logit of the tiles from this one on.
    float largest_from(int64_t first);

  private:
    bool edited(int64_t tile) const { return row_.edits != nullptr && row_.edits->touches(tile); }
    const float* processed(int64_t tile, float* scratch) const;
    LogitRow row_{};
    bool repaired_ = false;
};

// sum_i weight_i * logits_i, -inf at excluded tokens.
class MixedSource final : public TileSource {
  public:
    void reserve(const Sizes& most) { reserve_all(most.members, members_, weights_); }
    // `plausibility` > 0 excludes tokens whose probability under member 0 is below that share of its largest.
    void reset(const std::vector<LogitRow>& rows, const Weights& weights, double plausibility);
    bool splittable() const override { return false; }
    const float* tile(int64_t tile, float* scratch) override;
    float logit(int64_t token) const override;
    void repair(float factor) override;

  private:
    std::vector<MemberSource> members_;
    std::vector<float> weights_;  // of members_, none zero
    MemberSource plausible_;
    float threshold_ = -std::numeric_limits<float>::infinity();
};

}  // namespace specens
