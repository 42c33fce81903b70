#include "operators/flat.h"
#include "sample/sampler.h"

namespace specens {
namespace {

struct FlatDraw : FlatCall {
    specens_draw draw = specens_draw_init();

    explicit FlatDraw(ArgumentReader from) : FlatCall(std::move(from)) {
        read_random();
        reader.group();
        draw.step = reader.integer(0);
        draw.stream = reader.integer(0);
        draw.gumbel_count = reader.integer(0);
        read_report(draw);
        read_members();
        require(rule.table_size == 0, "one weight a member is needed");
        draw.target = &target;
        draw.random = &random;
    }
};

std::vector<TorchTensor> sample_cpu(const std::vector<TorchTensor>& tensors, const std::vector<int64_t>& integers,
                                    const std::optional<std::vector<double>>& numbers) {
    const FlatDraw flat(ArgumentReader(tensors, integers, numbers));
    const SampleArguments call(flat.draw);
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

STABLE_TORCH_LIBRARY_IMPL(specens, CPU, library) { library.impl("sample_cpp", TORCH_BOX(&specens::sample_cpu)); }
