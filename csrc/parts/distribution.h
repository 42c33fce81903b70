// Distributions over one row of logits, read tile by tile: a softmax, an ensemble of them, and draws from both.
// Numbers of a tile are float32, numbers of a row double.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "parts/filters.h"
#include "parts/rows.h"
#include "parts/status.h"

namespace specens {

constexpr double log2_e = 1.4426950408889634;

inline int64_t tile_count(int64_t vocab) { return (vocab + tile_size - 1) / tile_size; }

enum class LogitType { float32, bfloat16, float16 };

// One member's logits at one position.
struct LogitRow {
    const void* data;
    LogitType type;
    int64_t vocab;
};

// Float logits, tile by tile. As they are at first; once repaired, without NaN, +inf or numbers too large to scale.
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
    // One token's logit, as `tile` gives it.
    virtual float logit(int64_t token) const = 0;
    // From now on NaN counts as -inf, +inf as the largest float, and the row's largest logit as 0.
    virtual void repair() = 0;

  protected:
    int64_t vocab_ = 0;
    int32_t status_ = status_ok;
};

// The logits of one member.
class MemberSource final : public TileSource {
  public:
    void reset(const LogitRow& row);
    bool splittable() const override { return true; }
    const float* tile(int64_t tile, float* scratch) override;
    float logit(int64_t token) const override;
    void repair() override;
    // As `tile`, with its largest logit; repairs numbers that cannot be used, but does not shift the others.
    const float* usable_tile(int64_t tile, float* scratch, float& max);

  private:
    const float* widened(int64_t tile, float* scratch) const;
    LogitRow row_{};
    bool repaired_ = false;
    float shift_ = 0;
};

// sum_i weight_i * logits_i, -inf at excluded tokens.
class MixedSource final : public TileSource {
  public:
    // `plausibility` > 0 excludes tokens whose probability under member 0 is below that share of its largest.
    void reset(const std::vector<LogitRow>& rows, const float* weights, double plausibility);
    bool splittable() const override { return false; }
    const float* tile(int64_t tile, float* scratch) override;
    float logit(int64_t token) const override;
    void repair() override;

  private:
    std::vector<MemberSource> members_;
    std::vector<float> weights_;  // of members_, none zero
    MemberSource plausible_;
    float threshold_ = -std::numeric_limits<float>::infinity();
    float shift_ = 0;
};

// softmax(logits / temperature) of a source, filtered.
class Softmax final : private SearchedRow {
  public:
    // One pass over the source, and for filters another over the tokens that may be kept.
    void read(TileSource& source, double temperature, const FilterParameters& filter);
    // Only for `alive` and `most_likely`: the largest logits of a source.
    void read_maxima(TileSource& source);
    bool alive() const { return max_ > -std::numeric_limits<float>::infinity(); }
    int64_t most_likely() const;
    double probability(int64_t token) const;
    double logprob(int64_t token) const;
    // The log-probabilities of a tile's tokens, as `logprob` gives them.
    void write_logprobs(int64_t tile, float* out) const;
    double tile_mass(int64_t tile) const;
    // No token of the tile is more probable.
    double tile_bound(int64_t tile) const;
    // out[i] += factor * probability(first token of the tile + i)
    void add_tile(int64_t tile, double factor, float* out) const;

  private:
    bool read_sums(float offset);
    bool scan_groups();
    void apply(const FilterParameters& filter);
    double exponent(float logit) const { return double{logit} * scale_ - offset_; }
    bool filtered() const { return tile_sum_.empty(); }
    bool has_mass(int64_t tile) const { return tile < source_->tiles() && tile_max_[tile] >= threshold_; }
    int64_t vocab() const override { return source_->vocab(); }
    const float* values(int64_t tile, float* scratch) const override { return source_->tile(tile, scratch); }
    const std::vector<float>& group_max() const override { return group_max_; }
    void masses(const float* values, int64_t count, float* out) const override;
    double total_mass() const override;
    float value_of_mass(double mass) const override;
    float scaled_value(float value, double share) const override;

    TileSource* source_ = nullptr;
    float scale_ = 0;      // log2(e) / temperature
    float offset_ = 0;     // masses are relative to 2^offset
    float threshold_ = 0;  // of the logits that have mass
    float max_ = 0;
    double sum_ = 0;
    std::vector<float> tile_max_, tile_sum_, group_max_;  // tile_sum_: empty where a filter made it needless
    ThresholdSearch search_;
};

enum class EnsembleKind : int64_t { single = 0, mixture = 1, logit_mixture = 2 };

// How a request's members become one distribution.
struct EnsembleParameters {
    EnsembleKind kind;
    const float* weights;  // [members]
    double plausibility;   // 0 is off
    double temperature;    // 0: greedy
    FilterParameters filter;
    bool filter_members;  // a mixture's members are filtered, else the mixture
};

// The target distribution of one row.
class TargetRow final : private SearchedRow {
  public:
    // Reads the logits of every member. A greedy row without `probabilities` knows only `most_likely`, unless a mixture
    // needs them for it.
    void read(const std::vector<LogitRow>& rows, const EnsembleParameters& parameters, bool probabilities);
    int32_t status() const { return status_; }
    bool alive() const { return alive_; }
    int64_t vocab() const override { return vocab_; }
    int64_t tiles() const { return tile_count(vocab_); }
    bool splittable() const { return kind_ != EnsembleKind::logit_mixture; }
    int64_t most_likely() const;
    // Under the target; for greedy requests under the unfiltered ensemble at temperature 1.
    double probability(int64_t token) const;
    double logprob(int64_t token) const;
    void write_logprobs(int64_t tile, float* out) const;  // of the tokens of the vocabulary only
    double tile_mass(int64_t tile) const;
    // out[i] = share * probability(first token of the tile + i), 0 beyond the vocabulary
    void write_tile(int64_t tile, float* out, double share = 1) const;
    double entropy() const;  // in nats
    // A member's softmax at this temperature and filter and its status, if the ensemble has read it; else nullptr.
    const Softmax* member_softmax(int64_t member, double temperature, const FilterParameters& filter,
                                  int32_t& status) const;

  private:
    int64_t most_likely_of_mixture() const;
    void filter_mixture(const FilterParameters& filter);
    void mix_tile(int64_t tile, double share, float* out) const;
    TileSource& source(size_t index);
    const float* values(int64_t tile, float* scratch) const override;
    const std::vector<float>& group_max() const override { return group_max_; }
    void masses(const float* values, int64_t count, float* out) const override;
    double total_mass() const override { return 1; }
    float value_of_mass(double mass) const override { return static_cast<float>(mass); }
    float scaled_value(float value, double share) const override { return static_cast<float>(value * share); }

    std::vector<MemberSource> members_;
    MixedSource mixed_;
    std::vector<Softmax> softmaxes_;  // of each member in a mixture, else one
    std::vector<double> shares_;      // of each softmax; 0: without weight or without a token
    EnsembleKind kind_ = EnsembleKind::single;
    double temperature_ = 1;
    FilterParameters member_filter_;
    int64_t vocab_ = 0;
    bool alive_ = false;
    int32_t status_ = status_ok;
    bool filtered_ = false;  // the mixture as a whole: its tokens below the threshold have no mass
    Kept kept_{};
    std::vector<float> group_max_;
    ThresholdSearch search_;
};

// The lowest token whose cumulative mass exceeds coin * total mass, -1 where no token has mass.
// tile_masses: of each tile. fill(tile, out): writes the masses, >= 0, of a tile's tokens to `out`.
template <typename Fill>
int64_t draw(const std::vector<double>& tile_masses, int64_t vocab, double coin, Fill fill);

// First token of `masses` at which the running sum exceeds `target`, else the last one with mass, else -1.
int64_t first_exceeding(const float* masses, int64_t count, double target);

template <typename Fill>
int64_t draw(const std::vector<double>& tile_masses, int64_t vocab, double coin, Fill fill) {
    double total = 0;
    for (double mass : tile_masses) {
        total += mass;
    }
    const double target = coin * total;
    const auto tiles = static_cast<int64_t>(tile_masses.size());
    int64_t chosen = 0;
    double before = 0;
    while (chosen + 1 < tiles && !(before + tile_masses[chosen] > target)) {
        before += tile_masses[chosen];
        ++chosen;
    }
    // A tile's mass and the sum of its tokens' differ by rounding, so a chosen tile can turn out empty: the next one
    // with mass is taken, then the one before.
    alignas(64) float masses[tile_size];
    for (int64_t offset = 0; offset < tiles; ++offset) {
        const int64_t tile = chosen + offset < tiles ? chosen + offset : tiles - 1 - offset;
        const int64_t width = std::min(tile_size, vocab - tile * tile_size);
        fill(tile, masses);
        const int64_t found = first_exceeding(masses, width, offset == 0 ? target - before : 0.0);
        if (found >= 0) {
            return tile * tile_size + found;
        }
    }
    return -1;
}

}  // namespace specens
