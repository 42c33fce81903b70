#include "verify_chain/shard.h"

#include <algorithm>

namespace specens {
namespace {

constexpr int32_t of_logits = status_nan_logits | status_infinite_logits;  // the others say what whole rows have
constexpr float infinity = std::numeric_limits<float>::infinity();

}  // namespace

const RowEdits* ShardVerifier::read_target(const ShardRows& call, int64_t request, int64_t step) {
    row_edits_ = edits_.at(call.target, call.draft.tokens, call.parents, call.draft.known_tokens, request, step);
    call.target.rows(request, step, row_edits_, logits_);
    return row_edits_;
}

// The drafts that were drawn at a row.
void ShardVerifier::find_children(const ShardRows& call, int64_t request, int64_t row) {
    children_.clear();
    const bool tree = call.parents.given;
    for (int64_t index = tree ? 0 : row; index < (tree ? call.draft.draft_len : row + 1); ++index) {
        if (index < call.draft.draft_len && call.row_of(request, index) == row) {
            children_.push_back(index);
        }
    }
}

// All of what is told is filled with what tells nothing.
void ShardVerifier::read(const ShardRows& call, int64_t request, int64_t step, const ShardNumbers& results) {
    if (!call.target.valid(request)) {
        return;
    }
    const int64_t first_row = request * call.target.steps, own = first_row + step;
    const RowEdits* edits = read_target(call, request, step);
    target_.read(logits_, call.target.parameters(request), true);
    find_children(call, request, step);
    results.status[2 * own] = target_.status() & of_logits;
    const auto looked = [&](int64_t child) {
        return results.looked + (request * call.draft.draft_len + child) * call.looked_size();
    };
    const auto tell = [&](const Softmax& softmax, int64_t part) {  // part: of all parts
        const SliceSum sum = softmax.slice_sum();
        results.largest[part] = sum.largest;
        results.sums[part] = sum.sum;
        softmax.keep(results.state + part * call.state_size());
    };
    for (size_t part = 0; part < target_.parts(); ++part) {
        if (target_.share(part) > 0) {
            tell(target_.part(part), own * call.parts + static_cast<int64_t>(part));
            for (const int64_t child : children_) {
                looked(child)[part] = target_.part(part).logit(call.draft.token(request, child));
            }
        }
    }
    if (target_.alive() && target_.softmax() != nullptr) {
        results.tokens[own] = target_.most_likely();
    }
    if (!call.draft.has_distributions() || !call.draft.sampling.valid(request) ||
        call.target.parameters(request).temperature == 0) {
        return;
    }
    const auto part_of = [&](int64_t child) { return call.draft_part(request, child); };
    for (const int64_t child : children_) {
        const auto same = std::find_if(children_.begin(), children_.end(), [&](int64_t other) {
            return call.draft.drafter_of(request, other) == call.draft.drafter_of(request, child);
        });
        if (*same != child) {  // of one distribution, which is read once
            results.largest[part_of(child)] = results.largest[part_of(*same)];
            results.sums[part_of(child)] = results.sums[part_of(*same)];
            std::copy_n(results.state + part_of(*same) * call.state_size(), call.state_size(),
                        results.state + part_of(child) * call.state_size());
            std::copy_n(looked(*same) + call.parts - 1, call.looked_in_draft(), looked(child) + call.parts - 1);
            results.status[2 * (first_row + child) + 1] = results.status[2 * (first_row + *same) + 1];
            continue;
        }
        draft_.read(call.target, target_, call.draft, request, child, step, edits);
        results.status[2 * (first_row + child) + 1] = draft_.status() & of_logits;
        if (draft_.softmax() == nullptr) {
            continue;
        }
        tell(*draft_.softmax(), part_of(child));
        for (const int64_t sibling : children_) {
            double* in_draft = looked(child) + call.parts - 1;
            in_draft[call.parents.given ? sibling : 0] = draft_.softmax()->logit(call.draft.token(request, sibling));
        }
    }
}

// states: of all parts.
void ShardVerifier::resume_draft(DraftSlice& slice, const ShardRows& call, int64_t request, int64_t index,
                                 const RowEdits* edits, const float* states, double mass, float least) const {
    slice.resume(call.target, call.draft, request, index, call.row_of(request, index), edits,
                 states + call.draft_part(request, index) * call.state_size(), mass, least);
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
        const int64_t part = call.draft_part(request, step);
        draft_.resume(call.target, call.draft, request, step, edits, places.state + part * call.state_size(),
                      places.masses[part], places.least_of(part));
    }
    return target_.alive();
}

void ShardVerifier::weigh(const ShardRows& call, const ShardPlaces& places, int64_t request, int64_t index,
                          double* tile_masses) {
    std::fill_n(tile_masses, call.tiles, 0.0);
    if (call.parents.given) {
        alignas(64) float masses[tile_size];
        const bool there = resume_offers(call, places, request, index);
        for (int64_t tile = 0; there && tile < target_.tiles(); ++tile) {
            tile_masses[tile] = remainder_tile(tile, masses);
        }
    } else if (resume(call, places, request, index, true)) {
        for (int64_t tile = 0; tile < target_.tiles(); ++tile) {
            const double share = places.shares[request * places.count + index];
            tile_masses[tile] = residual_tile(target_, draft_, share, tile, nullptr);
        }
    }
}

bool ShardVerifier::resume_offers(const ShardRows& call, const ShardPlaces& places, int64_t request, int64_t index) {
    if (!resume(call, places, request, index, false)) {
        return false;
    }
    find_children(call, request, places.rows[request * places.count + index]);
    slices_.resize(std::max(slices_.size(), call.target.members.size()));
    offers_.clear();
    for (const int64_t child : children_) {
        const double* offer = places.offers + (request * call.draft.draft_len + child) * 2;
        if (!(offer[0] >= 0)) {
            continue;
        }
        const int64_t part = call.draft_part(request, child);
        const Softmax* draft = nullptr;
        if (places.masses[part] >= 0) {
            DraftSlice& slice = slices_[std::max<int64_t>(call.draft.drafter_of(request, child), 0)];
            draft = &slice.softmax();
            const auto uses = [draft](const Offer& other) { return other.draft == draft; };
            if (std::none_of(offers_.begin(), offers_.end(), uses)) {
                resume_draft(slice, call, request, child, row_edits_, places.state, places.masses[part],
                             places.least_of(part));
            }
        }
        offers_.push_back({call.draft.token(request, child), offer[0], offer[1], draft});
    }
    return true;
}

double ShardVerifier::remainder_tile(int64_t tile, float* masses) const {
    target_.write_tile(tile, masses, offers_.empty() ? 1.0 : offers_.front().share);
    const int64_t width = std::min(tile_size, target_.vocab() - tile * tile_size);
    double sum = offers_.empty() ? target_.tile_mass(tile) : 0;
    for (const Offer& offer : offers_) {
        if (&offer != &offers_.front()) {
            const auto factor = static_cast<float>(offer.share);
            std::transform(masses, masses + width, masses, [factor](float mass) { return mass * factor; });
        }
        if (offer.draft != nullptr) {
            offer.draft->add_tile(tile, -offer.scale, masses);
        } else if (offer.token >= 0 && offer.token / tile_size == tile) {
            masses[offer.token % tile_size] -= 1.0f;
        }
        sum = row_kernels().clamp_sum(masses, width);
    }
    return sum;
}

double ShardVerifier::mass_of_draft(const ShardRows& call, const ShardPlaces& places, int64_t request, int64_t index) {
    const int64_t node = places.rows[request * places.count + index], row = call.row_of(request, node);
    const int64_t part = call.draft_part(request, node);
    if (row < 0 || !call.target.valid(request) || !(places.masses[part] >= 0)) {
        return 0;
    }
    resume_draft(slices_[0], call, request, node, read_target(call, request, row), places.state, places.masses[part],
                 places.least_of(part));
    find_children(call, request, row);
    const Softmax& draft = slices_[0].softmax();
    double sum = 0;
    for (int64_t tile = 0; tile < draft.tiles(); ++tile) {
        alignas(64) float masses[tile_size] = {};
        bool written = false;
        for (const int64_t sibling : children_) {
            const int64_t token = call.draft.token(request, sibling);
            if (sibling < node && token >= 0 && token / tile_size == tile) {
                if (!written) {
                    draft.add_tile(tile, 1.0, masses);
                    written = true;
                }
                masses[token % tile_size] = 0;
            }
        }
        sum += written ? row_kernels().clamp_sum(masses, tile_size) : draft.tile_mass(tile);
    }
    return sum;
}

int64_t ShardVerifier::draw(const ShardRows& call, const ShardPlaces& places, const ShardDraws& draws,
                            int64_t request) {
    if (call.parents.given) {
        if (!resume_offers(call, places, request, 0)) {
            return -1;
        }
        const double* given = draws.tile_masses + request * call.tiles;
        tile_masses_.assign(given, given + target_.tiles());
        return draw_at(tile_masses_, target_.vocab(), draws.goals[request],
                       [&](int64_t tile, float* masses) { remainder_tile(tile, masses); });
    }
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
    const int64_t rows = call.target.batch * call.target.steps, all = rows * call.parts;
    std::fill_n(results.largest, all, -infinity);
    std::fill_n(results.sums, all, 0.0);
    std::fill_n(results.state, all * call.state_size(), 0.0f);
    std::fill_n(results.tokens, rows, 0);
    std::fill_n(results.status, 2 * rows, 0);
    std::fill_n(results.looked, call.target.batch * call.draft.draft_len * call.looked_size(), -infinity);
    for_rows(call, call.target.steps, [&](ShardVerifier& verifier, int64_t request, int64_t step, int64_t) {
        verifier.read(call, request, step, results);
    });
}

void weigh_shard(const ShardRows& call, const ShardPlaces& places, double* tile_masses) {
    for_rows(call, places.count, [&](ShardVerifier& verifier, int64_t request, int64_t place, int64_t index) {
        verifier.weigh(call, places, request, place, tile_masses + index * call.tiles);
    });
}

void weigh_drafts_of_shard(const ShardRows& call, const ShardPlaces& places, double* masses) {
    for_rows(call, places.count, [&](ShardVerifier& verifier, int64_t request, int64_t place, int64_t index) {
        masses[index] = verifier.mass_of_draft(call, places, request, place);
    });
}

void draw_of_shard(const ShardRows& call, const ShardPlaces& places, const ShardDraws& draws, int64_t* tokens) {
    for_rows(call, 1, [&](ShardVerifier& verifier, int64_t request, int64_t, int64_t) {
        tokens[request] = verifier.draw(call, places, draws, request);
    });
}

}  // namespace specens
