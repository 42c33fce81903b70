#include <torch/csrc/stable/library.h>

#include "verify_tree/verifier.h"

namespace specens {
namespace {

// The results of a batch, in the order in which the operator returns them; the padding is filled in.
struct TreeResults {
    std::vector<Tensor> tensors;
    int64_t *tokens, *num_accepted, *num_tokens, *next_token, *path;
    int32_t* status;
    ReportPlace report{};
    int64_t levels, top;

    explicit TreeResults(const TreeCall& call) : levels(call.tree.levels), top(call.report.top) {
        const int64_t batch = call.target.batch;
        tokens = add<int64_t>({batch, levels + 1}, ScalarType::Long, -1);
        num_accepted = add<int64_t>({batch}, ScalarType::Long, 0);
        num_tokens = add<int64_t>({batch}, ScalarType::Long, 0);
        next_token = add<int64_t>({batch}, ScalarType::Long, -1);
        status = add<int32_t>({batch}, ScalarType::Int, 0);
        path = add<int64_t>({batch, levels}, ScalarType::Long, -1);
        if (call.report.kind != ReportArguments::Kind::none) {
            report.logprob = add<float>({batch, levels + 1}, ScalarType::Float, 0);
        }
        if (top > 0) {
            const float lowest = -std::numeric_limits<float>::infinity();
            report.top_tokens = add<int64_t>({batch, levels + 1, top}, ScalarType::Long, -1);
            report.top_logprobs = add<float>({batch, levels + 1, top}, ScalarType::Float, lowest);
        }
    }
    TreeOutput request(int64_t index) const {
        const int64_t first = index * (levels + 1);
        return {tokens + first, path + index * levels, report.behind(first, top)};
    }

  private:
    template <typename Element>
    Element* add(std::initializer_list<int64_t> sizes, ScalarType dtype, Element fill) {
        tensors.push_back(new_tensor(sizes, dtype));
        auto* data = tensors.back().template mutable_data_ptr<Element>();
        std::fill_n(data, tensors.back().numel(), fill);
        return data;
    }
};

std::vector<Tensor> verify_tree_cpu(const std::vector<Tensor>& tensors, const std::vector<int64_t>& integers,
                                    const std::optional<std::vector<double>>& numbers) {
    const TreeCall call(ArgumentReader(tensors, integers, numbers));
    TreeResults results(call);
    for_requests(call.target.batch, call.target.vocab, [&](int64_t begin, int64_t end) {
        static thread_local TreeVerifier verifier;
        for (int64_t request = begin; request < end; ++request) {
            verifier.run(call, request, results.request(request));
            results.num_accepted[request] = verifier.num_accepted;
            results.next_token[request] = verifier.next_token;
            results.num_tokens[request] = verifier.num_accepted + (verifier.next_token >= 0 ? 1 : 0);
            results.status[request] = verifier.status;
        }
    });
    return std::move(results.tensors);
}

}  // namespace
}  // namespace specens

STABLE_TORCH_LIBRARY_IMPL(specens, CPU, library) {
    library.impl("verify_tree_cpp", TORCH_BOX(&specens::verify_tree_cpu));
}
