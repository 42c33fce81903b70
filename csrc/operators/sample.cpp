#include "operators/call.h"
#include "sample/sampler.h"

namespace specens {
namespace {

std::vector<TorchTensor> sample_cpu(const Members& member_logits, const OptionalTensor& allowed,
                                    const Numbers& ensemble, const Numbers& sampling, const Rows& rows,
                                    const Numbers& processing, const Rows& processing_rows,
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
    const int64_t batch = call.target.batch, top = call.report.top;
    const auto shaped = [&](ScalarType dtype) {
        return call.best > 0 ? new_tensor({batch, call.best}, dtype) : new_tensor({batch}, dtype);
    };
    std::vector<TorchTensor> output{shaped(ScalarType::Long), new_tensor({batch}, ScalarType::Int)};
    specens_drawn drawn = specens_drawn_init();
    drawn.tokens = output[0].mutable_data_ptr<int64_t>();
    drawn.status = output[1].mutable_data_ptr<int32_t>();
    if (call.report.kind != ReportArguments::Kind::none) {
        output.push_back(shaped(ScalarType::Float));
        drawn.logprobs = output[2].mutable_data_ptr<float>();
    }
    if (top > 0) {
        output.push_back(new_tensor({batch, top}, ScalarType::Long));
        output.push_back(new_tensor({batch, top}, ScalarType::Float));
        drawn.top_tokens = output[3].mutable_data_ptr<int64_t>();
        drawn.top_logprobs = output[4].mutable_data_ptr<float>();
    }
    const TorchThreads threads;
    sample(call, drawn);
    return output;
}

}  // namespace
}  // namespace specens

STABLE_TORCH_LIBRARY_FRAGMENT(specens, library) {
    library.def("sample(Tensor[] member_logits, *, " SPECENS_TARGET_OPTIONS
                ", Tensor[]? random=None, int step=0, int stream=2, int gumbel_count=0, int[]? logprobs=None)"
                " -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(specens, CPU, library) { library.impl("sample", TORCH_BOX(&specens::sample_cpu)); }
