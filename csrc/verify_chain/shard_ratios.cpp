#include <algorithm>

#include "verify_chain/shard.h"

namespace specens {

void ShardVerifier::add_exceeding(const ShardRows& call, const ShardPlaces& places, const ShardRatios& given,
                                  int64_t request, int64_t index, double* sums) {
    const int64_t place = request * places.count + index, count = given.count;
    std::fill_n(sums, 2 * count, 0.0);
    if (!resume_offers(call, places, request, index)) {
        return;
    }
    const int64_t node = given.nodes[place], part = call.draft_part(request, node);
    const Softmax* drawn = nullptr;  // of a sibling of this row that was
    if (call.row_of(request, node) == places.rows[place] && places.masses[part] >= 0) {
        DraftSlice& slice = slices_[std::max<int64_t>(call.draft.drafter_of(request, node), 0)];
        resume_draft(slice, call, request, node, row_edits_, places.state, places.masses[part], places.least_of(part));
        drawn = &slice.softmax();
    }
    const double share = places.shares[place];
    const double* ratios = given.ratios + place * count;
    for (int64_t tile = 0; tile < target_.tiles(); ++tile) {
        alignas(64) float left[tile_size], draft[tile_size] = {};
        remainder_tile(tile, left);
        if (drawn != nullptr) {
            drawn->add_tile(tile, 1.0, draft);
        }
        const int64_t width = std::min(tile_size, target_.vocab() - tile * tile_size);
        for (int64_t token = 0; token < width; ++token) {
            const double own = share * left[token], beside = draft[token];
            const auto exceeds = [own, beside](double ratio) { return own > ratio * beside; };
            if (own > 0 && exceeds(ratios[0])) {
                const int64_t last = exceeds(ratios[count - 1])
                                         ? count - 1
                                         : std::partition_point(ratios, ratios + count, exceeds) - ratios - 1;
                sums[last] += own;
                sums[count + last] += beside;
            }
        }
    }
    double *above = sums, *drafted = sums + count;
    for (int64_t ratio = count - 1; ratio-- > 0;) {
        above[ratio] += above[ratio + 1];
        drafted[ratio] += drafted[ratio + 1];
    }
    for (int64_t ratio = 0; ratio < count; ++ratio) {
        above[ratio] = std::max(0.0, above[ratio] - ratios[ratio] * drafted[ratio]);
    }
}

void add_up_exceeding(const ShardRows& call, const ShardPlaces& places, const ShardRatios& given, double* sums) {
    for_rows(call, places.count, [&](ShardVerifier& verifier, int64_t request, int64_t place, int64_t index) {
        verifier.add_exceeding(call, places, given, request, place, sums + index * 2 * given.count);
    });
}

}  // namespace specens
