#include <cmath>
#include <functional>

#include "verify_chain/shard.h"

namespace specens {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

}  // namespace

double ShardVerifier::entropy(const ShardRows& call, const ShardPlaces& places, int64_t request, int64_t index) {
    return resume(call, places, request, index, false) ? target_.entropy() : 0;
}

bool ShardVerifier::resume_scores(const ShardRows& call, const ShardPlaces& places, const ShardScale& scale,
                                  int64_t request, int64_t index) {
    const int64_t step = places.rows[request * places.count + index];
    if (step >= call.target.steps || !call.target.valid(request)) {
        return false;
    }
    const int64_t first = (request * call.target.steps + step) * call.parts;
    const double given = call.target.parameters(request).temperature;
    scores_ = {scale.largest + first, scale.log_totals + first, given == 0 ? 1 : given};
    resume_target(call, places, request, step);
    return target_.alive();
}

void ShardVerifier::write_part(size_t part, int64_t tile, double* out) const {
    target_.part(part).write_kept(tile, out);
    const double largest = scores_.largest[part], log_total = scores_.log_totals[part];
    for (int64_t index = 0; index < tile_size; ++index) {
        out[index] = std::min((out[index] - largest) / scores_.temperature - log_total, 0.0);
    }
}

void ShardVerifier::write_scores(int64_t tile, double* out) const {
    if (target_.softmax() != nullptr) {
        write_part(0, tile, out);
        return;
    }
    constexpr double lost = -40;  // of a logarithm: what it adds to 1 is rounded off
    double own[tile_size];
    std::fill_n(out, tile_size, -infinity);
    for (size_t part = 0; part < target_.parts(); ++part) {
        if (target_.share(part) == 0) {
            continue;
        }
        write_part(part, tile, own);
        const double log_share = std::log(target_.share(part));
        for (int64_t index = 0; index < tile_size; ++index) {
            const double larger = std::max(out[index], own[index] + log_share);
            const double less = std::min(out[index], own[index] + log_share) - larger;
            out[index] = less > lost ? std::min(larger + std::log1p(std::exp(less)), 0.0) : larger;
        }
    }
}

double ShardVerifier::score(int64_t token) const {
    double largest = -infinity;
    double total = 0;  // relative to the largest: small probabilities underflow
    for (size_t part = 0; part < target_.parts(); ++part) {
        const Softmax& softmax = target_.part(part);
        if (target_.share(part) == 0 || !(softmax.logit(token) > -infinity && softmax.keeps(token))) {
            continue;
        }
        const double scaled = (softmax.logit(token) - scores_.largest[part]) / scores_.temperature;
        const double own = std::log(target_.share(part)) + scaled - scores_.log_totals[part];
        const double bound = std::max(largest, own);
        total = total * std::exp(largest - bound) + std::exp(own - bound);
        largest = bound;
    }
    return total > 0 ? std::min(largest + std::log(total), 0.0) : -infinity;
}

void ShardVerifier::write_logprobs(const ShardRows& call, const ShardPlaces& places, const ShardScale& scale,
                                   int64_t request, int64_t index, float* out) {
    std::fill_n(out, call.target.vocab, static_cast<float>(-infinity));
    if (!resume_scores(call, places, scale, request, index)) {
        return;
    }
    double scores[tile_size];
    for (int64_t tile = 0; tile < target_.tiles(); ++tile) {
        write_scores(tile, scores);
        const int64_t first = tile * tile_size;
        std::copy_n(scores, std::min(tile_size, call.target.vocab - first), out + first);
    }
}

void ShardVerifier::find_top(const ShardRows& call, const ShardPlaces& places, const ShardScale& scale, int64_t request,
                             int64_t index, int64_t count, double* values, int64_t* tokens) {
    std::fill_n(values, count, -infinity);
    std::fill_n(tokens, count, int64_t{-1});
    if (!resume_scores(call, places, scale, request, index)) {
        return;
    }
    top_.clear();
    const auto better = std::mem_fn(&Scored::better_than);
    double scores[tile_size];
    for (int64_t tile = 0; tile < target_.tiles(); ++tile) {
        write_scores(tile, scores);
        const int64_t first = tile * tile_size, end = std::min(tile_size, target_.vocab() - first);
        for (int64_t in_tile = 0; in_tile < end; ++in_tile) {
            const bool full = static_cast<int64_t>(top_.size()) == count;
            const double least = full ? top_.front().score : -infinity;
            if (!(scores[in_tile] > least)) {
                continue;
            }
            if (full) {
                std::pop_heap(top_.begin(), top_.end(), better);
                top_.pop_back();
            }
            top_.push_back({scores[in_tile], first + in_tile});
            std::push_heap(top_.begin(), top_.end(), better);
        }
    }
    std::sort_heap(top_.begin(), top_.end(), better);
    for (size_t rank = 0; rank < top_.size(); ++rank) {
        values[rank] = top_[rank].score;
        tokens[rank] = top_[rank].token;
    }
}

double ShardVerifier::score_of(const ShardRows& call, const ShardPlaces& places, const ShardScale& scale,
                               int64_t request, int64_t index, int64_t token) {
    return token >= 0 && resume_scores(call, places, scale, request, index) ? score(token) : -infinity;
}

void add_up_entropies(const ShardRows& call, const ShardPlaces& places, double* entropies) {
    for_rows(call, places.count, [&](ShardVerifier& verifier, int64_t request, int64_t place, int64_t index) {
        entropies[index] = verifier.entropy(call, places, request, place);
    });
}

void write_logprobs_of_shard(const ShardRows& call, const ShardPlaces& places, const ShardScale& scale, float* out) {
    for_rows(call, places.count, [&](ShardVerifier& verifier, int64_t request, int64_t place, int64_t index) {
        verifier.write_logprobs(call, places, scale, request, place, out + index * call.target.vocab);
    });
}

void score_tokens_of_shard(const ShardRows& call, const ShardPlaces& places, const ShardScale& scale,
                           const int64_t* tokens, double* scores) {
    for_rows(call, places.count, [&](ShardVerifier& verifier, int64_t request, int64_t place, int64_t index) {
        scores[index] = verifier.score_of(call, places, scale, request, place, tokens[index]);
    });
}

void find_top_of_shard(const ShardRows& call, const ShardPlaces& places, const ShardScale& scale, int64_t count,
                       double* values, int64_t* tokens) {
    for_rows(call, places.count, [&](ShardVerifier& verifier, int64_t request, int64_t place, int64_t index) {
        verifier.find_top(call, places, scale, request, place, count, values + index * count, tokens + index * count);
    });
}

}  // namespace specens
