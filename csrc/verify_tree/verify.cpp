#include "verify_tree/verify.h"

#include "verify_tree/verifier.h"

namespace specens {

void verify_tree(const TreeCall& call, const specens_verdict& verdict, ScratchPool<TreeVerifier>* pool) {
    const int64_t levels = call.tree.levels;
    const int64_t top = call.report.top;
    const ReportBuffers reports{verdict.logprobs, verdict.top_tokens, verdict.top_logprobs};
    for_requests(call.target.batch, call.target.vocab, [&](int64_t begin, int64_t end) {
        Borrowed<TreeVerifier> verifier(pool);
        for (int64_t request = begin; request < end; ++request) {
            const int64_t first = request * (levels + 1);
            const TreeOutput own{verdict.tokens + first, verdict.path + request * levels, reports.after(first, top)};
            std::fill_n(own.tokens, levels + 1, int64_t{-1});
            std::fill_n(own.path, levels, int64_t{-1});
            own.report.pad(levels + 1, top);
            verifier->run(call, request, own);
            verdict.num_accepted[request] = verifier->num_accepted;
            verdict.next_token[request] = verifier->next_token;
            verdict.num_tokens[request] = verifier->num_accepted + (verifier->next_token >= 0 ? 1 : 0);
            verdict.status[request] = verifier->status;
        }
    });
}

}  // namespace specens
