#include "target_logprobs/score.h"

#include "parts/parallel.h"

namespace specens {

void target_logprobs(const LogprobArguments& call, float* logprobs, ScratchPool<RowScorer>* pool) {
    const int64_t steps = call.target.steps;
    parallel_for(call.target.batch * steps, 1, [&](int64_t begin, int64_t end) {
        Borrowed<RowScorer> scorer(pool);
        for (int64_t index = begin; index < end; ++index) {
            scorer->run(call, index / steps, index % steps, logprobs + index * call.target.vocab);
        }
    });
}

}  // namespace specens
