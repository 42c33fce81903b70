#include "operators/flat.h"
#include "verify_tree/verify.h"

namespace specens {
namespace {

struct FlatTree : FlatCall {
    specens_tree tree = specens_tree_init();

    explicit FlatTree(ArgumentReader from) : FlatCall(std::move(from)) {
        read_draft();
        reader.group();
        tree.parents = reader.tensor();
        tree.max_levels = reader.integer(-1);
        tree.without_replacement = static_cast<int32_t>(reader.integer(0));
        read_random();
        read_rule();
        read_report(tree);
        read_members();
        tree.target = &target;
        tree.draft = &draft;
        tree.random = &random;
        tree.rule = &rule;
    }
};

// In the order in which the operator returns them.
struct TreeResults {
    std::vector<TorchTensor> tensors;
    specens_verdict verdict = specens_verdict_init();

    explicit TreeResults(const TreeCall& call) {
        const int64_t batch = call.target.batch, levels = call.tree.levels, top = call.report.top;
        verdict.tokens = add<int64_t>({batch, levels + 1}, ScalarType::Long);
        verdict.num_accepted = add<int64_t>({batch}, ScalarType::Long);
        verdict.num_tokens = add<int64_t>({batch}, ScalarType::Long);
        verdict.next_token = add<int64_t>({batch}, ScalarType::Long);
        verdict.status = add<int32_t>({batch}, ScalarType::Int);
        verdict.path = add<int64_t>({batch, levels}, ScalarType::Long);
        if (call.report.kind != ReportArguments::Kind::none) {
            verdict.logprobs = add<float>({batch, levels + 1}, ScalarType::Float);
        }
        if (top > 0) {
            verdict.top_tokens = add<int64_t>({batch, levels + 1, top}, ScalarType::Long);
            verdict.top_logprobs = add<float>({batch, levels + 1, top}, ScalarType::Float);
        }
    }

  private:
    template <typename Element>
    Element* add(std::initializer_list<int64_t> sizes, ScalarType dtype) {
        tensors.push_back(new_tensor(sizes, dtype));
        return tensors.back().template mutable_data_ptr<Element>();
    }
};

std::vector<TorchTensor> verify_tree_cpu(const std::vector<TorchTensor>& tensors, const std::vector<int64_t>& integers,
                                         const std::optional<std::vector<double>>& numbers) {
    const FlatTree flat(ArgumentReader(tensors, integers, numbers));
    const TreeCall call(flat.tree);
    TreeResults results(call);
    const TorchThreads threads;
    verify_tree(call, results.verdict);
    return std::move(results.tensors);
}

}  // namespace
}  // namespace specens

STABLE_TORCH_LIBRARY_IMPL(specens, CPU, library) {
    library.impl("verify_tree_cpp", TORCH_BOX(&specens::verify_tree_cpu));
}
