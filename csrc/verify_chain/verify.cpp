#include "verify_chain/verify.h"

#include "verify_chain/verifier.h"

namespace specens {

void verify_chain(const ChainArguments& chain, const specens_verdict& verdict, ScratchPool<Verifier>* pool) {
    const int64_t width = chain.draft.draft_len + 1;
    const int64_t top = chain.report.top;
    const ReportBuffers reports{verdict.logprobs, verdict.top_tokens, verdict.top_logprobs};
    for_requests(chain.target.batch, chain.target.vocab, [&](int64_t begin, int64_t end) {
        Borrowed<Verifier> verifier(pool);
        for (int64_t request = begin; request < end; ++request) {
            const int64_t first = request * width;
            const RequestOutput own{verdict.tokens + first, reports.after(first, top)};
            std::fill_n(own.tokens, width, int64_t{-1});
            own.report.pad(width, top);
            verifier->run(chain, request, own);
            verdict.num_accepted[request] = verifier->num_accepted;
            verdict.next_token[request] = verifier->next_token;
            verdict.num_tokens[request] = verifier->num_accepted + (verifier->next_token >= 0 ? 1 : 0);
            verdict.status[request] = verifier->status;
        }
    });
}

}  // namespace specens
