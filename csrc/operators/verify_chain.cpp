#include "verify_chain/verify.h"

#include "operators/call.h"
#include "parts/overlap.h"

namespace specens {
namespace {

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

// Calls run(call, arguments) with what an operator was given.
template <typename Run>
auto with_arguments(const Run& run, const Members& member_logits, const TorchTensor& draft_tokens,
                    const OptionalTensor& row_offsets, const OptionalTensor& draft_lens, int64_t max_draft_len,
                    int64_t drafter, const OptionalTensor& drafters, const OptionalTensors& draft_logits,
                    const Numbers& draft_sampling, bool process_drafts, const OptionalTensor& allowed,
                    const Numbers& ensemble, const Numbers& sampling, const Rows& rows, const Numbers& processing,
                    const Rows& processing_rows, const OptionalTensors& random, const Numbers& rule,
                    const Integers& logprobs) {
    Call call(member_logits, {allowed, ensemble, sampling, rows, processing, processing_rows});
    call.target.row_offsets = call.view(row_offsets);
    call.set_draft(draft_tokens, draft_lens, drafter, drafters, draft_logits, draft_sampling, rows, process_drafts);
    call.draft.max_draft_len = max_draft_len;
    call.set_random(random);
    call.set_rule(rule);
    specens_chain chain = specens_chain_init();
    chain.target = &call.target;
    chain.draft = &call.draft;
    chain.random = &call.random;
    chain.rule = &call.rule;
    Call::set_report(chain, logprobs);
    return run(chain, ChainArguments(chain));
}

std::vector<TorchTensor> verify_chain_cpu(const Members& member_logits, const TorchTensor& draft_tokens,
                                          const OptionalTensor& row_offsets, const OptionalTensor& draft_lens,
                                          int64_t max_draft_len, int64_t drafter, const OptionalTensor& drafters,
                                          const OptionalTensors& draft_logits, const Numbers& draft_sampling,
                                          bool process_drafts, const OptionalTensor& allowed, const Numbers& ensemble,
                                          const Numbers& sampling, const Rows& rows, const Numbers& processing,
                                          const Rows& processing_rows, const OptionalTensors& random,
                                          const Numbers& rule, const Integers& logprobs) {
    const auto run = [](const specens_chain&, const ChainArguments& arguments) {
        std::vector<TorchTensor> results = new_results(arguments);
        const TorchThreads threads;
        verify_chain(arguments, places(results));
        return results;
    };
    return with_arguments(run, member_logits, draft_tokens, row_offsets, draft_lens, max_draft_len, drafter, drafters,
                          draft_logits, draft_sampling, process_drafts, allowed, ensemble, sampling, rows, processing,
                          processing_rows, random, rule, logprobs);
}

void verify_chain_out_cpu(const Members& member_logits, const TorchTensor& draft_tokens, const Members& out,
                          const OptionalTensor& row_offsets, const OptionalTensor& draft_lens, int64_t max_draft_len,
                          int64_t drafter, const OptionalTensor& drafters, const OptionalTensors& draft_logits,
                          const Numbers& draft_sampling, bool process_drafts, const OptionalTensor& allowed,
                          const Numbers& ensemble, const Numbers& sampling, const Rows& rows, const Numbers& processing,
                          const Rows& processing_rows, const OptionalTensors& random, const Numbers& rule,
                          const Integers& logprobs) {
    const auto run = [&](const specens_chain& chain, const ChainArguments& arguments) {
        check_results(out, arguments);
        const specens_verdict verdict = places(out);
        require_disjoint(
            results_of(verdict, arguments.target.batch, arguments.draft.draft_len + 1, arguments.report.top),
            inputs_of(chain));
        const TorchThreads threads;
        verify_chain(arguments, verdict);
    };
    with_arguments(run, member_logits, draft_tokens, row_offsets, draft_lens, max_draft_len, drafter, drafters,
                   draft_logits, draft_sampling, process_drafts, allowed, ensemble, sampling, rows, processing,
                   processing_rows, random, rule, logprobs);
}

}  // namespace
}  // namespace specens

#define SPECENS_CHAIN_OPTIONS                                                                         \
    "Tensor? row_offsets=None, Tensor? draft_lens=None, int max_draft_len=-1, " SPECENS_DRAFT_OPTIONS \
    ", " SPECENS_TARGET_OPTIONS ", Tensor[]? random=None, float[]? rule=None, int[]? logprobs=None"

STABLE_TORCH_LIBRARY_FRAGMENT(specens, library) {
    library.def("verify_chain(Tensor[] member_logits, Tensor draft_tokens, *, " SPECENS_CHAIN_OPTIONS ") -> Tensor[]");
    library.def(
        "verify_chain_out(Tensor[] member_logits, Tensor draft_tokens, Tensor(a!)[] out, "
        "*, " SPECENS_CHAIN_OPTIONS ") -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(specens, CPU, library) {
    library.impl("verify_chain", TORCH_BOX(&specens::verify_chain_cpu));
    library.impl("verify_chain_out", TORCH_BOX(&specens::verify_chain_out_cpu));
}
