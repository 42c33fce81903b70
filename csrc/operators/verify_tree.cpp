#include "operators/call.h"
#include "verify_tree/verify.h"

namespace specens {
namespace {

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

std::vector<TorchTensor> verify_tree_cpu(const Members& member_logits, const TorchTensor& draft_tokens,
                                         const TorchTensor& parents, int64_t max_levels, bool without_replacement,
                                         const OptionalTensor& num_nodes, int64_t drafter,
                                         const OptionalTensor& drafters, const OptionalTensors& draft_logits,
                                         const Numbers& draft_sampling, bool process_drafts,
                                         const OptionalTensor& allowed, const Numbers& ensemble,
                                         const Numbers& sampling, const Rows& rows, const Numbers& processing,
                                         const Rows& processing_rows, const OptionalTensors& random,
                                         const Numbers& rule, const Integers& logprobs) {
    Call call(member_logits, {allowed, ensemble, sampling, rows, processing, processing_rows});
    call.set_draft(draft_tokens, num_nodes, drafter, drafters, draft_logits, draft_sampling, rows, process_drafts);
    call.set_random(random);
    call.set_rule(rule);
    specens_tree tree = specens_tree_init();
    tree.target = &call.target;
    tree.draft = &call.draft;
    tree.random = &call.random;
    tree.rule = &call.rule;
    tree.parents = call.view(parents);
    tree.max_levels = max_levels;
    tree.without_replacement = without_replacement ? 1 : 0;
    Call::set_report(tree, logprobs);
    const TreeCall arguments(tree);
    TreeResults results(arguments);
    const TorchThreads threads;
    verify_tree(arguments, results.verdict);
    return std::move(results.tensors);
}

}  // namespace
}  // namespace specens

STABLE_TORCH_LIBRARY_FRAGMENT(specens, library) {
    library.def(
        "verify_tree(Tensor[] member_logits, Tensor draft_tokens, Tensor parents, int max_levels, *, "
        "bool without_replacement=False, Tensor? num_nodes=None, " SPECENS_DRAFT_OPTIONS ", " SPECENS_TARGET_OPTIONS
        ", Tensor[]? random=None, float[]? rule=None, int[]? logprobs=None) -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(specens, CPU, library) { library.impl("verify_tree", TORCH_BOX(&specens::verify_tree_cpu)); }
