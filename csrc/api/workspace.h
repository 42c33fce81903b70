// What a specens_workspace holds.
#pragma once

#include "compact_kv/spans.h"
#include "include/specens.h"
#include "parts/scratch.h"
#include "sample/sampler.h"
#include "target_logprobs/score.h"
#include "verify_chain/verifier.h"
#include "verify_tree/verifier.h"

struct specens_workspace {
    specens_threads threads;
    specens::ScratchPool<specens::Verifier> chains;
    specens::ScratchPool<specens::TreeVerifier> trees;
    specens::ScratchPool<specens::Sampler> draws;
    specens::ScratchPool<specens::RowScorer> scores;
    specens::ScratchPool<specens::Spans> spans;

    void reserve(const specens::Sizes& most) {
        const int64_t count = std::max<int64_t>(threads.num_threads, 1);
        const auto reserve = [&](int32_t operation, auto& pool, int64_t of_pool) {
            if ((most.operations & operation) != 0) {
                pool.reserve(of_pool, most);
            }
        };
        reserve(SPECENS_CHAINS, chains, count);
        reserve(SPECENS_TREES, trees, count);
        reserve(SPECENS_DRAWS, draws, count);
        reserve(SPECENS_LOGPROBS, scores, count);
        reserve(SPECENS_MOVES, spans, 1);
    }
};
