"""The launches of sample for compilation without a GPU."""

from __future__ import annotations

import torch

from bench.gpu.variants.examples import example_random, example_targets
from specens_kernels.arguments import (
    TARGET_LOGPROBS,
    Report,
)
from specens_kernels.ops.sample.triton_kernel import TOKEN_RULE
from specens_kernels.ops.sample.triton_scores import draw_found
from specens_kernels.ops.sample.triton_scores import launches as launches_of_scores
from specens_kernels.ops.sample.triton_shard import launches as shard_launches
from specens_kernels.ops.sample.triton_shard import new_best
from specens_kernels.ops.verify_chain.triton_kernel import launches, new_outcome
from specens_kernels.ops.verify_chain.triton_report import new_results
from specens_kernels.parts.draft import DraftView
from specens_kernels.parts.launches import Launch
from specens_kernels.parts.rules import new_rule
from specens_kernels.parts.scores import score_view
from specens_kernels.parts.statistics import new_statistics
from specens_kernels.parts.target import batch_of
from specens_kernels.rules import RuleKind


def variants() -> list[Launch]:
    """The draw; the pass is target_logprobs' own."""
    found = []
    for index, target in enumerate(example_targets()[1::2]):
        target = target._replace(steps=1)
        statistics = new_statistics(target, DraftView())
        results = new_results(batch_of(target), 1, Report(TARGET_LOGPROBS, 0), target.logits[0].device)
        outcome = new_outcome(results, statistics, RuleKind.TOKEN, logprobs=True)
        rule = new_rule(statistics, DraftView(), TOKEN_RULE, batch_of(target))
        *_, draw = launches(outcome, statistics, target, DraftView(), rule, example_random(index), 0, 2)
        found.append(draw)
        statistics, random = new_statistics(target, DraftView()), example_random(0)
        scores = score_view(target, statistics, random.seeds, random.positions, False)
        tokens, status = (
            torch.empty(8, 4, dtype=torch.int64, device="meta"),
            torch.empty(8, dtype=torch.int32, device="meta"),
        )
        *_, best = launches_of_scores(draw_found(tokens, None, status, 1), scores, statistics, target, DraftView())
        found.append(best)
        for count in (1, 5):
            *_, of_shard = shard_launches(new_best(target, count), scores._replace(first_block=8), statistics, target)
            found.append(of_shard)
    return found
