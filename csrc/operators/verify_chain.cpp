#include "verify_chain/verify.h"

#include "operators/flat.h"
#include "parts/overlap.h"

namespace specens {
namespace {

struct FlatChain : FlatCall {
    specens_chain chain = specens_chain_init();

    explicit FlatChain(ArgumentReader from) : FlatCall(std::move(from)) {
        read_draft();
        read_random();
        read_rule();
        read_report(chain);
        read_members();
        chain.target = &target;
        chain.draft = &draft;
        chain.random = &random;
        chain.rule = &rule;
    }
};

// The places of results, in the order in which operators return or take them.
specens_verdict places(const std::vector<TorchTensor>& tensors) {
    specens_verdict verdict = specens_verdict_init();
    verdict.tokens = tensors[0].mutable_data_ptr<int64_t>();
    verdict.num_accepted = tensors[1].mutable_data_ptr<int64_t>();
    verdict.num_tokens = tensors[2].mutable_data_ptr<int64_t>();
    verdict.next_token = tensors[3].mutable_data_ptr<int64_t>();
    verdict.status = tensors[4].mutable_data_ptr<int32_t>();
    verdict.logprobs = tensors.size() > 5 ? tensors[5].mutable_data_ptr<float>() : nullptr;
    if (tensors.size() > 6) {
        verdict.top_tokens = tensors[6].mutable_data_ptr<int64_t>();
        verdict.top_logprobs = tensors[7].mutable_data_ptr<float>();
    }
    return verdict;
}

size_t result_count(const ChainArguments& chain) {
    return chain.report.kind == ReportArguments::Kind::none ? 5 : chain.report.top == 0 ? 6 : 8;
}

std::vector<TorchTensor> new_results(const ChainArguments& chain) {
    const int64_t batch = chain.target.batch;
    const int64_t width = chain.draft.draft_len + 1;
    std::vector<TorchTensor> tensors;
    tensors.reserve(result_count(chain));
    tensors.push_back(new_tensor({batch, width}, ScalarType::Long));
    for (int repeat = 0; repeat < 3; ++repeat) {
        tensors.push_back(new_tensor({batch}, ScalarType::Long));
    }
    tensors.push_back(new_tensor({batch}, ScalarType::Int));
    if (chain.report.kind != ReportArguments::Kind::none) {
        tensors.push_back(new_tensor({batch, width}, ScalarType::Float));
    }
    if (chain.report.top > 0) {
        tensors.push_back(new_tensor({batch, width, chain.report.top}, ScalarType::Long));
        tensors.push_back(new_tensor({batch, width, chain.report.top}, ScalarType::Float));
    }
    return tensors;
}

void check_results(const std::vector<TorchTensor>& tensors, const ChainArguments& chain) {
    require(tensors.size() == result_count(chain), "a result is missing, or there is one too many");
    for (size_t index = 0; index < tensors.size(); ++index) {
        const bool matrix = index == 0 || index >= 5;
        const int64_t dims = index >= 6 ? 3 : matrix ? 2 : 1;
        const ScalarType dtype = index == 4                 ? ScalarType::Int
                                 : index == 5 || index == 7 ? ScalarType::Float
                                                            : ScalarType::Long;
        const TorchTensor& tensor = tensors[index];
        require(tensor.dim() == dims && tensor.size(0) == chain.target.batch &&
                    (dims < 2 || tensor.size(1) == chain.draft.draft_len + 1) &&
                    (dims < 3 || tensor.size(2) == chain.report.top) && tensor.scalar_type() == dtype &&
                    tensor.is_contiguous(),
                "a result is of another shape or type, or not contiguous");
    }
}

std::vector<TorchTensor> verify_chain_cpu(const std::vector<TorchTensor>& tensors, const std::vector<int64_t>& integers,
                                          const std::optional<std::vector<double>>& numbers) {
    const FlatChain call(ArgumentReader(tensors, integers, numbers));
    const ChainArguments chain(call.chain);
    std::vector<TorchTensor> results = new_results(chain);
    const TorchThreads threads;
    verify_chain(chain, places(results));
    return results;
}

void verify_chain_out_cpu(const std::vector<TorchTensor>& tensors, const std::vector<int64_t>& integers,
                          const std::optional<std::vector<double>>& numbers, const std::vector<TorchTensor>& out) {
    const FlatChain call(ArgumentReader(tensors, integers, numbers));
    const ChainArguments chain(call.chain);
    check_results(out, chain);
    const specens_verdict verdict = places(out);
    require_disjoint(results_of(verdict, chain.target.batch, chain.draft.draft_len + 1, chain.report.top),
                     inputs_of(call.chain));
    const TorchThreads threads;
    verify_chain(chain, verdict);
}

}  // namespace
}  // namespace specens

STABLE_TORCH_LIBRARY_IMPL(specens, CPU, library) {
    library.impl("verify_chain_cpp", TORCH_BOX(&specens::verify_chain_cpu));
    library.impl("verify_chain_out_cpp", TORCH_BOX(&specens::verify_chain_out_cpu));
}
