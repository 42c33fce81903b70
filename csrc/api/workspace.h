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
};
