// The operations on host memory of specens.h.
#include "api/guarded.h"
#include "api/workspace.h"
#include "compact_kv/arguments.h"
#include "parts/overlap.h"
#include "tree_mask/mask_row.h"
#include "uniforms/uniforms.h"
#include "verify_chain/verify.h"
#include "verify_tree/verify.h"

using namespace specens;

namespace {

// The threads of a call, for as long as this object lives.
struct InWorkspace {
    explicit InWorkspace(const specens_workspace* workspace)
        : of_call(workspace != nullptr ? &workspace->threads : nullptr) {}
    ThreadsOfCall of_call;
};

// Of an empty batch, whose buffers may be NULL, nothing is written.
void check_verdict(const specens_verdict& verdict, int64_t batch) {
    require(batch == 0 || (verdict.tokens != nullptr && verdict.num_accepted != nullptr &&
                           verdict.num_tokens != nullptr && verdict.next_token != nullptr && verdict.status != nullptr),
            "verdict: expected tokens, num_accepted, num_tokens, next_token and status, got NULL");
}

}  // namespace

int32_t specens_verify_chain(const specens_chain* given, const specens_verdict* result, specens_workspace* workspace) {
    return guarded([&] {
        const specens_chain call = adopted("chain", given, specens_chain_init());
        const specens_verdict verdict = adopted("verdict", result, specens_verdict_init());
        const ChainArguments chain(call);
        check_verdict(verdict, chain.target.batch);
        chain.report.check_buffers(chain.target.batch, verdict.logprobs, verdict.top_tokens, verdict.top_logprobs);
        memory_of(verdict, chain.target.batch, chain.draft.draft_len + 1, chain.report.top).require_apart(call);
        const InWorkspace scope(workspace);
        verify_chain(chain, verdict, workspace != nullptr ? &workspace->chains : nullptr);
    });
}

int32_t specens_verify_tree(const specens_tree* given, const specens_verdict* result, specens_workspace* workspace) {
    return guarded([&] {
        const specens_tree call = adopted("tree", given, specens_tree_init());
        const specens_verdict verdict = adopted("verdict", result, specens_verdict_init());
        const TreeCall tree(call);
        check_verdict(verdict, tree.target.batch);
        require(verdict.path != nullptr || tree.tree.levels == 0 || tree.target.batch == 0,
                "verdict: expected path, got NULL");
        tree.report.check_buffers(tree.target.batch, verdict.logprobs, verdict.top_tokens, verdict.top_logprobs);
        memory_of(verdict, tree.target.batch, tree.tree.levels + 1, tree.report.top).require_apart(call);
        const InWorkspace scope(workspace);
        verify_tree(tree, verdict, workspace != nullptr ? &workspace->trees : nullptr);
    });
}

int32_t specens_sample(const specens_draw* given, const specens_drawn* result, specens_workspace* workspace) {
    return guarded([&] {
        const specens_draw call = adopted("draw", given, specens_draw_init());
        const specens_drawn drawn = adopted("drawn", result, specens_drawn_init());
        const SampleArguments draw(call);
        require(draw.target.batch == 0 || (drawn.tokens != nullptr && drawn.status != nullptr),
                "drawn: expected tokens and status, got NULL");
        draw.report.check_buffers(draw.target.batch, drawn.logprobs, drawn.top_tokens, drawn.top_logprobs);
        ResultMemory results;
        results.add_results(drawn.tokens, draw.target.batch * draw.count());
        results.add_results(drawn.status, draw.target.batch);
        results.add_results(drawn.logprobs, draw.target.batch * draw.count());
        results.add_results(drawn.top_tokens, draw.target.batch * draw.report.top);
        results.add_results(drawn.top_logprobs, draw.target.batch * draw.report.top);
        results.require_apart(call);
        const InWorkspace scope(workspace);
        sample(draw, drawn, workspace != nullptr ? &workspace->draws : nullptr);
    });
}

int32_t specens_target_logprobs(const specens_target* target, const specens_tensor* drafts, float* logprobs,
                                specens_workspace* workspace) {
    return guarded([&] {
        const LogprobArguments call(target, drafts);
        const int64_t numbers = call.target.batch * call.target.steps * call.target.vocab;
        require(logprobs != nullptr || numbers == 0, "logprobs: expected a buffer, got NULL");
        ResultMemory results;
        results.add_results(logprobs, numbers);
        results.require_apart(target);
        results.require_apart(drafts);
        const InWorkspace scope(workspace);
        target_logprobs(call, logprobs, workspace != nullptr ? &workspace->scores : nullptr);
    });
}

int32_t specens_uniforms(const specens_tensor* seeds, const specens_tensor* positions, const specens_tensor* steps,
                         int64_t stream, double* uniforms, specens_workspace* workspace) {
    return guarded([&] {
        require(seeds != nullptr && positions != nullptr && steps != nullptr,
                "seeds, positions, steps: expected all of them, got NULL");
        const int64_t count = count_elements(*seeds);
        require(uniforms != nullptr || count == 0, "uniforms: expected a buffer, got NULL");
        const InWorkspace scope(workspace);
        write_uniforms(uniform_arguments(*seeds, *positions, *steps, stream, uniforms), count);
    });
}

int32_t specens_tree_mask(const specens_mask* given, specens_workspace* workspace) {
    return guarded([&] {
        const specens_mask call = adopted("mask", given, specens_mask_init());
        require(call.parents != nullptr && call.prefix_lens != nullptr,
                "parents, prefix_lens: expected both of them, got NULL");
        require((call.mask != nullptr && call.positions != nullptr) || count_elements(*call.parents) == 0,
                "mask, positions: expected buffers, got NULL");
        MaskArguments arguments =
            mask_arguments(*call.parents, *call.prefix_lens, call.num_nodes, call.layout, call.max_prefix, call.window);
        arguments.positions = call.positions;
        const InWorkspace scope(workspace);
        write_mask(arguments, call.layout, call.dtype, call.mask);
    });
}

int32_t specens_compact_kv(const specens_kv_moves* given, specens_workspace* workspace) {
    return guarded([&] {
        const specens_kv_moves call = adopted("moves", given, specens_kv_moves_init());
        const CompactArguments arguments(call);
        require((call.lengths != nullptr && call.status != nullptr) || arguments.moves.batch == 0,
                "lengths, status: expected buffers, got NULL");
        const InWorkspace scope(workspace);
        move_slots(arguments, workspace != nullptr ? &workspace->spans : nullptr);
    });
}
