#include "operators/flat.h"
#include "target_logprobs/score.h"

namespace specens {
namespace {

TorchTensor target_logprobs_cpu(const std::vector<TorchTensor>& tensors, const std::vector<int64_t>& integers,
                                const std::optional<std::vector<double>>& numbers) {
    FlatCall flat(ArgumentReader(tensors, integers, numbers));
    flat.reader.group();
    const Tensor* drafts = flat.reader.tensor();
    flat.read_members();
    require(flat.rule.table_size == 0, "one weight a member is needed");
    const LogprobArguments call(&flat.target, drafts);
    TorchTensor logprobs = new_tensor({call.target.batch, call.target.steps, call.target.vocab}, ScalarType::Float);
    const TorchThreads threads;
    target_logprobs(call, logprobs.mutable_data_ptr<float>());
    return logprobs;
}

}  // namespace
}  // namespace specens

STABLE_TORCH_LIBRARY_IMPL(specens, CPU, library) {
    library.impl("target_logprobs_cpp", TORCH_BOX(&specens::target_logprobs_cpu));
}
