// The distribution of one source of logits. Numbers of a tile are float32, numbers of a row double.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "parts/filters.h"
#include "parts/sources.h"

namespace specens {

constexpr double log2_e = 1.4426950408889634;

constexpr int64_t slice_state(int64_t tiles) { return 1 + 2 * tiles; }

// What a probability is not below and not above.
struct Bounds {
    double low, high;
};

// The largest logit of a slice of a row, and the sum of powers relative to it.
struct SliceSum {
    double largest, sum;
};

// softmax(logits / temperature) of a source, filtered.
class Softmax final : private SearchedRow {
  public:
    void reserve(const Sizes& most) {
        reserve_all(most.tiles(), tile_max_, tile_sum_);
        reserve_all(most.blocks(), group_max_);
    }
    // One pass over the source, and for filters another over the tokens that may be kept. roughly: where there is no
    // filter and all numbers are usual ones, for `alive` and `bounds` alone until it is refined, in half the time.
    void read(TileSource& source, double temperature, const FilterParameters& filter, ThresholdSearch& search,
              bool roughly = false);
    // As if it had not been read roughly.
    void refine();
    // Of a source that is a slice of a row and has no filter: what others need to know, and what `resume` needs to
    // know, [slice_state(tiles)], so that no slice is read twice for its sums.
    SliceSum slice_sum() const;
    void keep(float* state) const;
    // As read, where so much of the whole row's mass is in the slice. least: of logits that filters keep, -inf: of all.
    void resume(TileSource& source, double temperature, ThresholdSearch& search, const float* state, double mass,
                float least);
    // A token's logit, -inf where there is none.
    double logit(int64_t token) const {
        return token >= 0 && token < source_->vocab() ? source_->original(source_->logit(token))
                                                      : -std::numeric_limits<double>::infinity();
    }
    // The same of a tile's tokens, and of its most likely one.
    void write_logits(int64_t tile, double* out) const;
    // To `out` [tile_size], -inf where a filter keeps none, and beyond the vocabulary.
    void write_kept(int64_t tile, double* out) const;
    double largest_logit(int64_t tile) const { return source_->original(tile_max_[tile]); }
    // Only for `alive` and `most_likely`: the largest logits of a source.
    void read_maxima(TileSource& source);
    bool alive() const { return max_ > -std::numeric_limits<float>::infinity(); }
    int64_t most_likely() const;
    double probability(int64_t token) const;
    Bounds bounds(int64_t token) const;
    double logprob(int64_t token) const;
    // The log-probabilities of a tile's tokens, as `logprob` gives them.
    void write_logprobs(int64_t tile, float* out) const;
    double tile_mass(int64_t tile) const;
    // No token of the tile is more probable.
    double tile_bound(int64_t tile) const;
    // Whether both have mass in a tile, of equally many tokens.
    bool shares_tile(const Softmax& other, int64_t tile) const;
    // max(0, share * probability - that of `other`) of the tokens of a tile that they share, to `out` [tile_size] if it
    // is given; returns their sum.
    double excess_of(const Softmax& other, double share, int64_t tile, float* out) const;
    // out[i] += factor * probability(first token of the tile + i)
    void add_tile(int64_t tile, double factor, float* out) const;

    // For scores: the source's numbers, as which logarithm of a probability they count, and back, rounded down.
    int64_t tiles() const { return source_->tiles(); }
    float tile_max(int64_t tile) const { return tile_max_[tile]; }
    int64_t width(int64_t tile) const { return source_->width(tile); }
    const float* tile(int64_t tile, float* scratch) const { return source_->tile(tile, scratch); }
    double logprob_of(float value) const;
    float least_value_of(double logprob) const;
    // What rounding can change in the log-probability of a token that is not hopeless.
    double rounding() const;
    bool keeps(int64_t token) const;
    // The tokens that a filter keeps, in order.
    void kept_tokens(std::vector<int64_t>& out) const;

  private:
    void start(TileSource& source, double temperature);
    void add_sums();
    void keep_from(float least);
    template <typename Read>
    bool read_tiles(int64_t first, const Read& read);
    void read_all(bool roughly);
    bool find_origin();
    bool read_sums();
    bool read_rough_sums();
    bool read_groups();
    bool read_tile_maxima();
    void apply(const FilterParameters& filter, ThresholdSearch& search);
    double exponent(float logit) const { return double{logit} * scale_ - offset_; }
    ScaledPowers powers(double share) const;
    bool filtered() const { return tile_sum_.empty(); }
    bool has_mass(int64_t tile) const { return tile < source_->tiles() && tile_max_[tile] >= threshold_; }
    // Calls run(first, count) for the runs of a tile's tokens that may have mass, by their indices in the tile.
    template <typename Run>
    void for_runs(int64_t tile, const Run& run) const;
    int64_t vocab() const override { return source_->vocab(); }
    const float* values(int64_t tile, float* scratch) const override { return source_->tile(tile, scratch); }
    const std::vector<float>& group_max() const override { return group_max_; }
    void masses(const float* values, int64_t count, float* out) const override;
    double total_mass() const override;
    float value_of_mass(double mass) const override;
    float scaled_value(float value, double share) const override;

    TileSource* source_ = nullptr;
    float scale_ = 0;      // log2(e) / temperature, over a factor that the source applies
    float factor_ = 1;     // a power of two, where float32 could not multiply with the scale
    float offset_ = 0;     // masses are relative to 2^offset
    float threshold_ = 0;  // of the logits that have mass
    float max_ = 0;
    double sum_ = 0;
    int64_t first_tile_ = 0;  // that may have a token
    float origin_ = 0;        // the largest logit of that tile
    bool rough_ = false;
    std::vector<float> tile_max_, tile_sum_, group_max_;  // tile_sum_: empty where a filter made it needless
};

}  // namespace specens
