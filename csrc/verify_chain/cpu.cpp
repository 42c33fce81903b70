#include <torch/csrc/stable/library.h>

#include "parts/overlap.h"
#include "verify_chain/verifier.h"

namespace specens {
namespace {

// The results of a batch, in the order in which operators return or take them.
struct ChainOutput {
    int64_t *tokens, *num_accepted, *num_tokens, *next_token;
    int32_t* status;
    ReportPlace report{};
    int64_t width, top;

    ChainOutput(const std::vector<Tensor>& tensors, const ChainArguments& chain)
        : width(chain.draft.draft_len + 1), top(chain.report.top) {
        tokens = tensors[0].mutable_data_ptr<int64_t>();
        num_accepted = tensors[1].mutable_data_ptr<int64_t>();
        num_tokens = tensors[2].mutable_data_ptr<int64_t>();
        next_token = tensors[3].mutable_data_ptr<int64_t>();
        status = tensors[4].mutable_data_ptr<int32_t>();
        if (tensors.size() > 5) {
            report.logprob = tensors[5].mutable_data_ptr<float>();
        }
        if (tensors.size() > 6) {
            report.top_tokens = tensors[6].mutable_data_ptr<int64_t>();
            report.top_logprobs = tensors[7].mutable_data_ptr<float>();
        }
    }
    // A request's places, filled with padding.
    RequestOutput request(int64_t index) const {
        const int64_t first = index * width;
        const RequestOutput own{tokens + first, report.behind(first, top)};
        std::fill_n(own.tokens, width, int64_t{-1});
        own.report.pad(width, top);
        return own;
    }
};

size_t result_count(const ChainArguments& chain) {
    return chain.report.kind == ReportArguments::Kind::none ? 5 : chain.report.top == 0 ? 6 : 8;
}

std::vector<Tensor> new_results(const ChainArguments& chain) {
    const int64_t batch = chain.target.batch;
    const int64_t width = chain.draft.draft_len + 1;
    std::vector<Tensor> tensors;
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

void check_results(const std::vector<Tensor>& tensors, const ChainArguments& chain) {
    require(tensors.size() == result_count(chain), "a result is missing, or there is one too many");
    for (size_t index = 0; index < tensors.size(); ++index) {
        const bool matrix = index == 0 || index >= 5;
        const int64_t dims = index >= 6 ? 3 : matrix ? 2 : 1;
        const ScalarType dtype = index == 4                 ? ScalarType::Int
                                 : index == 5 || index == 7 ? ScalarType::Float
                                                            : ScalarType::Long;
        const Tensor& tensor = tensors[index];
        require(tensor.dim() == dims && tensor.size(0) == chain.target.batch &&
                    (dims < 2 || tensor.size(1) == chain.draft.draft_len + 1) &&
                    (dims < 3 || tensor.size(2) == chain.report.top) && tensor.scalar_type() == dtype &&
                    tensor.is_contiguous(),
                "a result is of another shape or type, or not contiguous");
    }
}

void verify(const ChainArguments& chain, const std::vector<Tensor>& tensors) {
    const ChainOutput output(tensors, chain);
    for_requests(chain.target.batch, chain.target.vocab, [&](int64_t begin, int64_t end) {
        static thread_local Verifier verifier;
        for (int64_t request = begin; request < end; ++request) {
            verifier.run(chain, request, output.request(request));
            output.num_accepted[request] = verifier.num_accepted;
            output.next_token[request] = verifier.next_token;
            output.num_tokens[request] = verifier.num_accepted + (verifier.next_token >= 0 ? 1 : 0);
            output.status[request] = verifier.status;
        }
    });
}

std::vector<Tensor> verify_chain_cpu(const std::vector<Tensor>& tensors, const std::vector<int64_t>& integers,
                                     const std::optional<std::vector<double>>& numbers) {
    const ChainArguments chain(ArgumentReader(tensors, integers, numbers));
    std::vector<Tensor> results = new_results(chain);
    verify(chain, results);
    return results;
}

void verify_chain_out_cpu(const std::vector<Tensor>& tensors, const std::vector<int64_t>& integers,
                          const std::optional<std::vector<double>>& numbers, const std::vector<Tensor>& out) {
    const ChainArguments chain(ArgumentReader(tensors, integers, numbers));
    check_results(out, chain);
    require_disjoint(out, tensors);
    verify(chain, out);
}

}  // namespace
}  // namespace specens

STABLE_TORCH_LIBRARY_IMPL(specens, CPU, library) {
    library.impl("verify_chain_cpp", TORCH_BOX(&specens::verify_chain_cpu));
    library.impl("verify_chain_out_cpp", TORCH_BOX(&specens::verify_chain_out_cpu));
}
