#include "sample/shard.h"

#include <limits>

#include "parts/parallel.h"

namespace specens {

void ShardReader::run(const ShardArguments& call, int64_t request, int64_t step, const ShardResults& results) {
    const TargetArguments& target = call.target;
    const int64_t row = request * target.steps + step;
    results.values[row] = -std::numeric_limits<double>::infinity();
    results.tokens[row] = -1;
    results.status[row] = status_ok;
    if (!target.valid(request)) {
        return;
    }
    std::optional<NoiseKey> key;
    if (call.seeds.given()) {
        key = NoiseKey{static_cast<uint64_t>(call.seeds(request)), static_cast<uint64_t>(call.positions(request, step)),
                       static_cast<uint32_t>(call.first_block)};
    }
    target.rows(request, step, edits_.at(target, call.drafts, target.vocab, request, step), logits_);
    const int64_t token = scores_.find_best(logits_, target.parameters(request), key);
    results.status[row] = scores_.status() & ~status_no_token;
    if (token >= 0) {
        results.values[row] = scores_.logit(token);
        results.tokens[row] = token;
    }
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
