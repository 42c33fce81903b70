#include <algorithm>

#include "verify_chain/shard.h"

namespace specens {

namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

}  // namespace

double ShardVerifier::exact_logit(const EnsembleParameters& parameters, int64_t token) const {
    if (parameters.kind == EnsembleKind::single) {
        return ExactLogits(logits_[0]).logit(token);
    }
    double total = 0;
    for (size_t member = 0; member < logits_.size(); ++member) {
        if (parameters.weights[member] != 0) {
            total += parameters.weights[member] * ExactLogits(logits_[member]).logit(token);
        }
    }
    return total;
}

void ShardVerifier::find_best(const ShardRows& call, const ShardPlaces& places, const ShardNoise& random,
                              int64_t request, int64_t index, int64_t count, double* values, int64_t* tokens) {
    std::fill_n(values, count, -infinity);
    std::fill_n(tokens, count, int64_t{-1});
    if (!resume(call, places, request, index, false)) {
        return;
    }
    kept_.clear();
    target_.softmax()->kept_tokens(kept_);
    const int64_t shift = random.first_token % block_size;  // from the slice's tokens to those of whole blocks
    noise_.start(NoiseKey{static_cast<uint64_t>(random.seeds[request]),
                          static_cast<uint64_t>(random.positions[request * places.count + index]),
                          static_cast<uint32_t>(random.first_token / block_size)},
                 target_.vocab() + shift);
    const EnsembleParameters parameters = call.target.parameters(request);
    const double origin = target_.softmax()->slice_sum().largest;
    int64_t block = -1, tile = -1;
    best_.start(count, 0);
    for (const int64_t token : kept_) {
        const int64_t place = token + shift;
        if (place / block_size != block) {
            block = place / block_size;
            if (place / tile_size != tile) {
                tile = place / tile_size;
                noise_.draw_tiles(tile, tile + 1);
            }
        }
        const double value = (exact_logit(parameters, token) - origin) / parameters.temperature;
        if (value + noise_.bound(block) >= best_.limit()) {
            best_.add({noise_.score(place, value, noise_.largest(block)), token});
        }
    }
    for (const Scored& found : best_.list()) {
        *values++ = exact_logit(parameters, found.token);
        *tokens++ = found.token;
    }
}

void find_best_of_shard(const ShardRows& call, const ShardPlaces& places, const ShardNoise& random, int64_t count,
                        double* values, int64_t* tokens) {
    for_rows(call, places.count, [&](ShardVerifier& verifier, int64_t request, int64_t place, int64_t index) {
        verifier.find_best(call, places, random, request, place, count, values + index * count, tokens + index * count);
    });
}

}  // namespace specens
