#include "sample/shard.h"

#include <algorithm>
#include <limits>

#include "parts/parallel.h"

namespace specens {

void ShardReader::run(const ShardArguments& call, int64_t request, int64_t step, const ShardResults& results) {
    const TargetArguments& target = call.target;
    const int64_t row = request * target.steps + step;
    double* values = results.values + row * call.count;
    int64_t* tokens = results.tokens + row * call.count;
    std::fill_n(values, call.count, -std::numeric_limits<double>::infinity());
    std::fill_n(tokens, call.count, int64_t{-1});
    results.status[row] = status_ok;
    if (!target.valid(request)) {
        return;
    }
    std::optional<NoiseKey> key;
    if (call.seeds.given()) {
        key = NoiseKey{static_cast<uint64_t>(call.seeds(request)), static_cast<uint64_t>(call.positions(request, step)),
                       static_cast<uint32_t>(call.first_block)};
    }
    const RowEdits* edits = edits_.at(target, call.drafts, call.parents, target.vocab, request, step);
    target.rows(request, step, edits, logits_);
    for (const Scored& best : scores_.find(logits_, target.parameters(request), key, call.count)) {
        *values++ = scores_.logit(best.token);
        *tokens++ = best.token;
    }
    results.status[row] = scores_.status() & ~status_no_token;
}

void best_of_shard(const ShardArguments& call, const ShardResults& results) {
    const int64_t steps = call.target.steps;
    parallel_for(call.target.batch * steps, 1, [&](int64_t begin, int64_t end) {
        Borrowed<ShardReader> reader(nullptr);
        for (int64_t index = begin; index < end; ++index) {
            reader->run(call, index / steps, index % steps, results);
        }
    });
}

}  // namespace specens
