#include <bit>
#include <cmath>

#include "parts/parallel.h"
#include "verify_chain/shard.h"

namespace specens {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

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

// In the order of the numbers.
int64_t key_of(double logit, bool half) {
    const uint16_t bits = bits_of(static_cast<float>(logit) + 0.0f, half);
    return bits >= 0x8000 ? 0xFFFF - bits : bits + 0x8000;
}

template <typename Run>
void for_rows(const ShardRows& call, const ShardSearch& search, const Run& run) {
    const int64_t rows = search.rows(call);
    parallel_for(call.target.batch * rows, 1, [&](int64_t begin, int64_t end) {
        Borrowed<ShardVerifier> verifier(nullptr);
        for (int64_t index = begin; index < end; ++index) {
            run(*verifier, index / rows, index % rows, index);
        }
    });
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
    const RowEdits* edits = read_target(call, request, step);
    if (search.of_drafts) {
        draft_.resume(call.target, call.draft, request, step, edits, state + part * call.state_size(), 1, -infinity);
        return draft_.softmax();
    }
    target_.resume(logits_, call.target.parameters(request), state, call.state_size(), search.masses + first, nullptr);
    return target_.alive() ? &target_.part(part) : nullptr;
}

void ShardVerifier::add_up(const ShardRows& call, const ShardSearch& search, const ShardBuckets& buckets,
                           int64_t request, int64_t row, double* sums) {
    std::fill_n(sums, shard_buckets, 0.0);
    const Softmax* own = searched(call, search, request, row);
    if (own == nullptr) {
        return;
    }
    const int64_t index = request * search.rows(call) + row;
    const double given =
        search.of_drafts ? call.draft.sampling.temperature(request) : call.target.parameters(request).temperature;
    const double temperature = given == 0 ? 1 : given;
    const double largest = buckets.largest[index];
    const float least = buckets.least[index];
    const int64_t prefix = buckets.prefix[index];
    double logits[tile_size];
    for (int64_t tile = 0; tile < own->tiles(); ++tile) {
        if (own->largest_logit(tile) < least || own->largest_logit(tile) == -infinity) {
            continue;
        }
        own->write_logits(tile, logits);
        for (int64_t token = 0; token < own->width(tile); ++token) {
            if (!(logits[token] >= least && logits[token] > -infinity)) {
                continue;
            }
            const int64_t key = key_of(logits[token], buckets.half);
            if (key >> (buckets.shift + 8) == prefix) {
                const double mass = buckets.counts ? 1 : std::exp((logits[token] - largest) / temperature);
                sums[key >> buckets.shift & (shard_buckets - 1)] += mass;
            }
        }
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
    for_rows(call, search, [&](ShardVerifier& verifier, int64_t request, int64_t row, int64_t index) {
        verifier.add_up(call, search, buckets, request, row, sums + index * shard_buckets);
    });
}

void find_largest_of_shard(const ShardRows& call, const ShardSearch& search, int64_t count, double* values,
                           double* ties) {
    for_rows(call, search, [&](ShardVerifier& verifier, int64_t request, int64_t row, int64_t index) {
        ties[index] = verifier.find_largest(call, search, request, row, count, values + index * count);
    });
}

}  // namespace specens
