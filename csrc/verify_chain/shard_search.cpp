#include <bit>
#include <cmath>
#include <utility>

#include "verify_chain/shard.h"

namespace specens {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

constexpr float float_max = std::numeric_limits<float>::max();

// The bits of a number as a 16-bit one, which it is, or the largest float32 for an infinite one.
uint16_t bits_of(float value, bool half) {
    const auto word = std::bit_cast<uint32_t>(value);
    if (!half) {
        return static_cast<uint16_t>((word + 0x8000) >> 16);
    }
    const auto sign = static_cast<uint16_t>(word >> 16 & 0x8000);
    const float size = std::abs(value);
    if (size > 65504) {
        return sign | 0x7C00;
    }
    const uint32_t bits = word & 0x7FFFFFFF;
    return sign | static_cast<uint16_t>(size < 0x1p-14f ? static_cast<uint32_t>(size * 0x1p24f)
                                                        : (bits >> 13) - ((127 - 15) << 10));
}

// In the order of the numbers, and back.
int64_t key_of(double logit, bool half) {
    const uint16_t bits = bits_of(static_cast<float>(logit) + 0.0f, half);
    return bits >= 0x8000 ? 0xFFFF - bits : bits + 0x8000;
}

float logit_of(int64_t key, bool half) {
    const auto bits = static_cast<uint16_t>(key >= 0x8000 ? key - 0x8000 : 0xFFFF - key);
    float logit;
    (half ? row_kernels().widen_fp16 : row_kernels().widen_bf16)(&bits, 1, &logit);
    return std::clamp(logit, -float_max, float_max);
}

constexpr uint32_t sign_bit = uint32_t{1} << 31;

uint32_t key_of(double logit) {
    const auto word = std::bit_cast<uint32_t>(static_cast<float>(logit) + 0.0f);
    return word >= sign_bit ? ~word : word + sign_bit;
}

float logit_of(uint32_t key) { return std::bit_cast<float>(key >= sign_bit ? key - sign_bit : ~key); }

// Masses of keys, and their octaves.
class KeyWeights {
  public:
    KeyWeights(const ShardWeights& given, int64_t index, double temperature)
        : counts_(given.counts), largest_(given.largest[index]), temperature_(temperature) {}
    double weight(uint32_t key) const {
        return counts_ ? 1 : std::exp((double{logit_of(key)} - largest_) / temperature_);
    }
    double octave(uint32_t key) const {
        return counts_ ? 0 : std::clamp(std::floor(double{logit_of(key)} / temperature_ / std::log(2.0)), -far, far);
    }
    // The least key whose octave is not below one, by halving.
    int64_t first_key(double octave_wanted) const {
        int64_t low = key_of(-infinity), high = int64_t{key_of(infinity)} + 1;
        while (low < high) {
            const int64_t middle = low + (high - low) / 2;
            if (octave(static_cast<uint32_t>(middle)) >= octave_wanted) {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        return low;
    }
    static constexpr double far = 0x1p50;

  private:
    bool counts_;
    double largest_, temperature_;
};

// Ascending, by digits of 11 bits.
void sort_keys(std::vector<uint32_t>& keys, std::vector<uint32_t>& scratch) {
    constexpr int digit = 11, values = 1 << digit;
    scratch.resize(keys.size());
    for (int shift = 0; shift < 32; shift += digit) {
        size_t starts[values + 1] = {};
        for (const uint32_t key : keys) {
            ++starts[(key >> shift & (values - 1)) + 1];
        }
        for (int value = 0; value < values; ++value) {
            starts[value + 1] += starts[value];
        }
        for (const uint32_t key : keys) {
            scratch[starts[key >> shift & (values - 1)]++] = key;
        }
        keys.swap(scratch);
    }
}

double temperature_of(const ShardRows& call, const ShardSearch& search, int64_t request) {
    const double given =
        search.of_drafts ? call.draft.sampling.temperature(request) : call.target.parameters(request).temperature;
    return given == 0 ? 1 : given;
}

}  // namespace

const Softmax* ShardVerifier::searched(const ShardRows& call, const ShardSearch& search, int64_t request, int64_t row) {
    const int64_t step = search.of_drafts ? row : row % call.target.steps;
    const int64_t part = search.of_drafts ? call.parts - 1 : row / call.target.steps;
    const int64_t first = (request * call.target.steps + step) * call.parts;
    if (!call.target.valid(request) || !(search.masses[first + part] >= 0)) {
        return nullptr;
    }
    const float* state = search.state + first * call.state_size();
    if (search.of_drafts) {
        const int64_t drawn_at = call.row_of(request, step);
        if (drawn_at < 0) {
            return nullptr;
        }
        resume_draft(slices_[0], call, request, step, read_target(call, request, drawn_at), search.state, 1, -infinity);
        return &slices_[0].softmax();
    }
    read_target(call, request, step);
    target_.resume(logits_, call.target.parameters(request), state, call.state_size(), search.masses + first, nullptr);
    return target_.share(part) > 0 ? &target_.part(part) : nullptr;
}

void ShardVerifier::add_up(const ShardRows& call, const ShardSearch& search, const ShardBuckets& buckets,
                           int64_t request, int64_t row, double* sums) {
    std::fill_n(sums, shard_buckets, 0.0);
    const Softmax* own = searched(call, search, request, row);
    if (own == nullptr) {
        return;
    }
    const int64_t index = request * search.rows(call) + row;
    const double temperature = temperature_of(call, search, request);
    const double largest = buckets.largest[index];
    const int64_t prefix = buckets.prefix[index], shift = buckets.shift;
    if (shift == 16) {
        for_logits(*own, buckets.least[index],
                   [&](double logit) { sums[0] += buckets.counts ? 1 : std::exp((logit - largest) / temperature); });
        return;
    }
    counts_.resize(1 << 16);
    int64_t low = 1 << 16, high = -1;
    for_logits(*own, buckets.least[index], [&](double logit) {
        const int64_t key = key_of(logit, buckets.half);
        ++counts_[key];
        low = std::min(low, key);
        high = std::max(high, key);
    });
    for (int64_t key = low; key <= high; ++key) {  // one power for all tokens of a key
        const uint32_t count = std::exchange(counts_[key], 0);
        if (count > 0 && key >> (shift + 8) == prefix) {
            const double mass = buckets.counts ? 1 : std::exp((logit_of(key, buckets.half) - largest) / temperature);
            sums[key >> shift & (shard_buckets - 1)] += count * mass;
        }
    }
}

template <typename Run>
void ShardVerifier::for_logits(const Softmax& own, double least, const Run& run) const {
    double logits[tile_size];
    for (int64_t tile = 0; tile < own.tiles(); ++tile) {
        if (own.largest_logit(tile) < least || own.largest_logit(tile) == -infinity) {
            continue;
        }
        own.write_logits(tile, logits);
        for (int64_t token = 0; token < own.width(tile); ++token) {
            if (logits[token] >= least && logits[token] > -infinity) {
                run(logits[token]);
            }
        }
    }
}

void ShardVerifier::take_samples(const ShardRows& call, const ShardSearch& search, const ShardWeights& weights,
                                 int64_t request, int64_t row, const ShardSamples& samples) {
    const int64_t index = request * search.rows(call) + row;
    double* sums = samples.weights + index * samples.octaves;
    double* top = samples.codes + index * (1 + samples.count);
    double* codes = top + 1;
    std::fill_n(sums, samples.octaves, 0.0);
    std::fill_n(codes, samples.count, 0.0);
    *top = -KeyWeights::far;
    const Softmax* own = searched(call, search, request, row);
    if (own == nullptr) {
        return;
    }
    keys_.clear();
    for_logits(*own, weights.least[index], [&](double logit) { keys_.push_back(key_of(logit)); });
    sort_keys(keys_, sorted_);
    const auto count = static_cast<int64_t>(keys_.size());
    const KeyWeights of_keys(weights, index, temperature_of(call, search, request));
    if (count == 0) {
        return;
    }
    *top = of_keys.weight(keys_.back()) > 0 ? of_keys.octave(keys_.back()) : -KeyWeights::far;
    // From the least on, so that of a token's octave the sum of those below it loses nothing. A sample stands after
    // every so many, from the largest on.
    const int64_t every = (count + samples.count - 1) / samples.count;
    int64_t next_octave = -1, place = -1;
    double weight = 0, below = 0;
    values_.assign(samples.count, 0.0);
    for (int64_t at = 0; at < count; ++at) {
        const uint32_t key = keys_[at];
        if (at == 0 || key != keys_[at - 1]) {
            weight = of_keys.weight(key);
            if (key >= next_octave) {
                const double octave = of_keys.octave(key);
                next_octave = of_keys.first_key(octave + 1);
                const auto own_place =
                    static_cast<int64_t>(std::clamp(*top - octave, 0.0, static_cast<double>(samples.octaves - 1)));
                below = own_place == place ? below : 0;
                place = own_place;
            }
        }
        if ((count - at) % every == 0) {
            const int64_t sample = (count - at) / every - 1;
            values_[sample] = below;
            codes[sample] = static_cast<double>(place);
        }
        below += weight;
        sums[place] += weight;
    }
    constexpr double beside_key = 0x1p21;
    for (int64_t sample = 0; sample < count / every; ++sample) {
        const double whole = sums[static_cast<int64_t>(codes[sample])];
        const double share = whole > 0 ? std::clamp(1 - values_[sample] / whole, 0.0, 1.0) : 0;
        const uint32_t key = keys_[count - (sample + 1) * every];
        codes[sample] = key * beside_key + std::floor(share * (beside_key - 1));
    }
}

void ShardVerifier::find_entries(const ShardRows& call, const ShardSearch& search, const ShardWeights& weights,
                                 int64_t request, int64_t row, const ShardEntries& entries) {
    const int64_t index = request * search.rows(call) + row;
    int64_t* keys = entries.keys + index * entries.count;
    double* repeats = entries.repeats + index * entries.count;
    double* of_keys = entries.weights + index * entries.count;
    entries.over[index] = 0;
    std::fill_n(keys, entries.count, int64_t{-1});
    std::fill_n(repeats, entries.count, 0.0);
    std::fill_n(of_keys, entries.count, 0.0);
    const Softmax* own = searched(call, search, request, row);
    if (own == nullptr) {
        return;
    }
    const KeyWeights all(weights, index, temperature_of(call, search, request));
    const int64_t above = std::min(all.first_key(entries.octave[index] + 1),
                                   std::max(entries.high[index], all.first_key(entries.octave[index])));
    const int64_t low = std::max(entries.low[index], all.first_key(entries.octave[index]));
    keys_.clear();
    for_logits(*own, weights.least[index], [&](double logit) {
        const uint32_t key = key_of(logit);
        if (key >= above) {
            entries.over[index] += all.weight(key);
        } else if (key >= low) {
            keys_.push_back(key);
        }
    });
    sort_keys(keys_, sorted_);
    int64_t slot = -1;
    for (auto key = keys_.rbegin(); key != keys_.rend(); ++key) {
        const double weight = all.weight(*key);
        if (weight == 0) {
            break;
        }
        if (slot < 0 || keys[slot] != *key) {
            if (++slot == entries.count) {
                break;
            }
            keys[slot] = *key;
        }
        repeats[slot] += 1;
        of_keys[slot] += weight;
    }
}

double ShardVerifier::find_largest(const ShardRows& call, const ShardSearch& search, int64_t request, int64_t row,
                                   int64_t count, double* values) {
    std::fill_n(values, count, -infinity);
    const Softmax* own = searched(call, search, request, row);
    if (own == nullptr) {
        return 0;
    }
    values_.resize(own->tiles() * tile_size);
    for (int64_t tile = 0; tile < own->tiles(); ++tile) {
        own->write_logits(tile, values_.data() + tile * tile_size);
    }
    values_.resize((own->tiles() - 1) * tile_size + own->width(own->tiles() - 1));
    const auto found = std::min(count, static_cast<int64_t>(values_.size()));
    const auto end = values_.begin() + found;
    std::nth_element(values_.begin(), end - 1, values_.end(), std::greater<>());
    std::sort(values_.begin(), end, std::greater<>());
    std::copy(values_.begin(), end, values);
    const double last = values[found - 1];
    return last > -infinity ? static_cast<double>(std::count(end, values_.end(), last)) : 0;
}

void add_up_shard(const ShardRows& call, const ShardSearch& search, const ShardBuckets& buckets, double* sums) {
    for_rows(call, search.rows(call), [&](ShardVerifier& verifier, int64_t request, int64_t row, int64_t index) {
        verifier.add_up(call, search, buckets, request, row, sums + index * shard_buckets);
    });
}

void take_samples_of_shard(const ShardRows& call, const ShardSearch& search, const ShardWeights& weights,
                           const ShardSamples& samples) {
    for_rows(call, search.rows(call), [&](ShardVerifier& verifier, int64_t request, int64_t row, int64_t) {
        verifier.take_samples(call, search, weights, request, row, samples);
    });
}

void find_entries_of_shard(const ShardRows& call, const ShardSearch& search, const ShardWeights& weights,
                           const ShardEntries& entries) {
    for_rows(call, search.rows(call), [&](ShardVerifier& verifier, int64_t request, int64_t row, int64_t) {
        verifier.find_entries(call, search, weights, request, row, entries);
    });
}

void find_largest_of_shard(const ShardRows& call, const ShardSearch& search, int64_t count, double* values,
                           double* ties) {
    for_rows(call, search.rows(call), [&](ShardVerifier& verifier, int64_t request, int64_t row, int64_t index) {
        ties[index] = verifier.find_largest(call, search, request, row, count, values + index * count);
    });
}

}  // namespace specens
