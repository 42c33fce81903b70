#include "operators/call.h"
#include "operators/results.h"
#include "sample/sampler.h"

namespace specens {
namespace {

void sample_cpu(Results& results, const Members& member_logits, const OptionalTensor& allowed, const Numbers& ensemble,
                const Numbers& sampling, const Rows& rows, const Numbers& processing, const Rows& processing_rows,
                const OptionalTensors& random, int64_t step, int64_t stream, int64_t gumbel_count,
                const Integers& logprobs) {
    Call given(member_logits, {allowed, ensemble, sampling, rows, processing, processing_rows});
    given.set_random(random);
    specens_draw draw = specens_draw_init();
    draw.target = &given.target;
    draw.random = &given.random;
    draw.step = step;
    draw.stream = stream;
    draw.gumbel_count = gumbel_count;
    Call::set_report(draw, logprobs);
    const SampleArguments call(draw);
    const int64_t batch = call.target.batch, best = call.best;
    const auto add = [&]<typename Element>(Element*& data, ScalarType dtype) {
        data = best > 0 ? results.add<Element>({batch, best}, dtype) : results.add<Element>({batch}, dtype);
    };
    specens_drawn drawn = specens_drawn_init();
    add(drawn.tokens, ScalarType::Long);
    drawn.status = results.add<int32_t>({batch}, ScalarType::Int);
    if (call.report.kind != ReportArguments::Kind::none) {
        add(drawn.logprobs, ScalarType::Float);
    }
    if (call.report.top > 0) {
        drawn.top_tokens = results.add<int64_t>({batch, call.report.top}, ScalarType::Long);
        drawn.top_logprobs = results.add<float>({batch, call.report.top}, ScalarType::Float);
    }
    results.finish(draw);
    const TorchThreads threads;
    sample(call, drawn);
}

}  // namespace
}  // namespace specens

SPECENS_OPERATOR(sample,

                 "Tensor[] member_logits, *, " SPECENS_TARGET_OPTIONS
                 ", Tensor[]? random=None, int step=0, int stream=2, int gumbel_count=0, int[]? logprobs=None",
                 "Tensor[]", make)
