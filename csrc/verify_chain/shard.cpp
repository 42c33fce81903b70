#include "verify_chain/shard.h"

namespace specens {
namespace {

constexpr int32_t of_logits = status_nan_logits | status_infinite_logits;  // the others say what whole rows have
constexpr float infinity = std::numeric_limits<float>::infinity();

}  // namespace

const RowEdits* ShardVerifier::read_target(const ShardRows& call, int64_t request, int64_t step) {
    const RowEdits* edits = edits_.at(call.target, call.draft.tokens, call.draft.known_tokens, request, step);
    call.target.rows(request, step, edits, logits_);
    return edits;
}

void ShardVerifier::read(const ShardRows& call, int64_t request, int64_t step, const ShardNumbers& results) {
    const int64_t row = request * call.target.steps + step;
    const int64_t first = row * call.parts;
    std::fill_n(results.largest + first, call.parts, -infinity);
    std::fill_n(results.sums + first, call.parts, 0.0);
    std::fill_n(results.state + first * call.state_size(), call.parts * call.state_size(), 0.0f);
    results.tokens[row] = 0;
    std::fill_n(results.status + 2 * row, 2, 0);
    const bool drafted = step < call.draft.draft_len;
    double* looked = results.looked + (request * call.draft.draft_len + step) * call.parts;
    if (drafted) {
        std::fill_n(looked, call.parts, -infinity);
    }
    if (!call.target.valid(request)) {
        return;
    }
    const RowEdits* edits = read_target(call, request, step);
    target_.read(logits_, call.target.parameters(request), true);
    results.status[2 * row] = target_.status() & of_logits;
    const auto tell = [&](const Softmax& own, int64_t part) {
        const SliceSum sum = own.slice_sum();
        results.largest[first + part] = sum.largest;
        results.sums[first + part] = sum.sum;
        own.keep(results.state + (first + part) * call.state_size());
        if (drafted) {
            looked[part] = own.logit(call.draft.token(request, step));
        }
    };
    for (size_t part = 0; part < target_.parts(); ++part) {
        if (target_.share(part) > 0) {
            tell(target_.part(part), static_cast<int64_t>(part));
        }
    }
    if (target_.alive() && target_.softmax() != nullptr) {
        results.tokens[row] = target_.most_likely();
    }
    if (drafted && call.draft.has_distributions() && call.draft.sampling.valid(request) &&
        call.target.parameters(request).temperature != 0) {
        draft_.read(call.target, target_, call.draft, request, step, edits, false);
        results.status[2 * row + 1] = draft_.status() & of_logits;
        if (draft_.softmax() != nullptr) {
            tell(*draft_.softmax(), call.parts - 1);
        }
    }
}

const RowEdits* ShardVerifier::resume_target(const ShardRows& call, const ShardPlaces& places, int64_t request,
                                             int64_t step) {
    const int64_t first = (request * call.target.steps + step) * call.parts;
    const RowEdits* edits = read_target(call, request, step);
    target_.resume(logits_, call.target.parameters(request), places.state + first * call.state_size(),
                   call.state_size(), places.masses + first, places.least != nullptr ? places.least + first : nullptr);
    return edits;
}

// False where there is no target; drafted: whether there has to be a draft.
bool ShardVerifier::resume(const ShardRows& call, const ShardPlaces& places, int64_t request, int64_t index,
                           bool drafted) {
    const int64_t step = places.rows[request * places.count + index];
    if (step >= (drafted ? call.draft.draft_len : call.target.steps) || !call.target.valid(request) ||
        call.target.parameters(request).temperature == 0) {
        return false;
    }
    const RowEdits* edits = resume_target(call, places, request, step);
    if (drafted) {
        const int64_t last = (request * call.target.steps + step + 1) * call.parts - 1;
        draft_.resume(call.target, call.draft, request, step, edits, places.state + last * call.state_size(),
                      places.masses[last], places.least != nullptr ? places.least[last] : -infinity);
    }
    return target_.alive();
}

void ShardVerifier::weigh(const ShardRows& call, const ShardPlaces& places, int64_t request, int64_t index,
                          double* tile_masses) {
    std::fill_n(tile_masses, call.tiles, 0.0);
    if (resume(call, places, request, index, true)) {
        for (int64_t tile = 0; tile < target_.tiles(); ++tile) {
            const double share = places.shares[request * places.count + index];
            tile_masses[tile] = residual_tile(target_, draft_, share, tile, nullptr);
        }
    }
}

int64_t ShardVerifier::draw(const ShardRows& call, const ShardPlaces& places, const ShardDraws& draws,
                            int64_t request) {
    const bool subtracts = draws.subtracts[request];
    if (!resume(call, places, request, 0, subtracts)) {
        return -1;
    }
    tile_masses_.resize(target_.tiles());
    for (int64_t tile = 0; tile < target_.tiles(); ++tile) {
        tile_masses_[tile] = subtracts ? draws.tile_masses[request * call.tiles + tile] : target_.tile_mass(tile);
    }
    return draw_at(tile_masses_, target_.vocab(), draws.goals[request], [&](int64_t tile, float* masses) {
        if (subtracts) {
            residual_tile(target_, draft_, places.shares[request], tile, masses);
        } else {
            target_.write_tile(tile, masses);
        }
    });
}

void read_shard(const ShardRows& call, const ShardNumbers& results) {
    for_rows(call, call.target.steps, [&](ShardVerifier& verifier, int64_t request, int64_t step, int64_t) {
        verifier.read(call, request, step, results);
    });
}

void weigh_shard(const ShardRows& call, const ShardPlaces& places, double* tile_masses) {
    for_rows(call, places.count, [&](ShardVerifier& verifier, int64_t request, int64_t place, int64_t index) {
        verifier.weigh(call, places, request, place, tile_masses + index * call.tiles);
    });
}

void draw_of_shard(const ShardRows& call, const ShardPlaces& places, const ShardDraws& draws, int64_t* tokens) {
    for_rows(call, 1, [&](ShardVerifier& verifier, int64_t request, int64_t, int64_t) {
        tokens[request] = verifier.draw(call, places, draws, request);
    });
}

}  // namespace specens
