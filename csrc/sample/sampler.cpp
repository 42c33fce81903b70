#include "sample/sampler.h"

#include "parts/parallel.h"

namespace specens {

void sample(const SampleArguments& call, const specens_drawn& drawn, ScratchPool<Sampler>* pool) {
    const int64_t count = call.count();
    const ReportBuffers reports{drawn.logprobs, drawn.top_tokens, drawn.top_logprobs};
    for_requests(call.target.batch, call.target.vocab, [&](int64_t begin, int64_t end) {
        Borrowed<Sampler> sampler(pool);
        for (int64_t request = begin; request < end; ++request) {
            const std::span<int64_t> tokens(drawn.tokens + request * count, count);
            sampler->run(call, request, tokens);
            drawn.status[request] = sampler->status;
            if (call.report.kind != ReportArguments::Kind::none) {
                ReportBuffers own = reports.after(request, call.report.top);
                own.logprob = reports.logprob + request * count;
                sampler->report(call, request, tokens, own);
            }
        }
    });
}

}  // namespace specens
