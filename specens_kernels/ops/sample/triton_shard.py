"""The best tokens of rows on a GPU, of which this is a part of the vocabulary; what others have is compared elsewhere.

Two launches, the pass over the logits and the search, as of whole rows; the noise is that of the tokens' own blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specens_kernels.arguments import ready_for_kernels, target_of
from specens_kernels.ops.sample.triton_scores import pass_launches, search_launch
from specens_kernels.parts.draft import DraftView
from specens_kernels.parts.gumbel import NOISE_BLOCK
from specens_kernels.parts.launches import Launch, run, wait_for_launch_before
from specens_kernels.parts.sampling import INFINITY
from specens_kernels.parts.score_search import search_scores
from specens_kernels.parts.scores import ScoreView, score_logits, score_view
from specens_kernels.parts.statistics import NO_TOKEN, Statistics, new_statistics
from specens_kernels.parts.target import TargetView, batch_of, target_is_valid, target_view


class ShardBest(NamedTuple):
    """What is written of each row, as `best_of_shard` of C++ does, but in any order."""

    logits: Tensor  # float64 [batch, steps, count], of the best tokens, or sums of weighted ones; -inf for none
    tokens: Tensor  # int64 [batch, steps, count], as the part counts them, -1 for none
    status: Tensor  # int32 [batch, steps]
    count: int
    BEST: tl.constexpr  # the power of two from it


@triton.jit
def _shard_kernel(
    best,  # ShardBest, written
    scores,  # ScoreView, its positions those of each row
    statistics,  # Statistics
    target,  # TargetView
    DEPENDENT: tl.constexpr,
):
    wait_for_launch_before(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    request = row // target.steps
    step = row % target.steps
    value = tl.zeros([best.BEST], tl.float64) - INFINITY
    token = tl.zeros([best.BEST], tl.int64) - 1
    status = tl.full([], 0, tl.int32)
    if target_is_valid(target, request):
        position = row
        if scores.HAS_SEEDS:
            position = tl.load(scores.positions + row)
        found, chosen, bits = search_scores(scores, statistics, target, request, step, position, best.BEST, best.count)
        there = (found > -INFINITY) & (tl.arange(0, best.BEST) < best.count)
        chosen = tl.where(there, chosen, 0)
        logits = score_logits(scores, target, request, step, chosen, -INFINITY).logits
        value = tl.where(there, logits.to(tl.float64), -INFINITY)
        token = tl.where(there, chosen, -1).to(tl.int64)
        status = bits.to(tl.int32) & ~NO_TOKEN
    index = tl.arange(0, best.BEST)
    tl.store(best.logits + row * best.count + index, value, mask=index < best.count)
    tl.store(best.tokens + row * best.count + index, token, mask=index < best.count)
    tl.store(best.status + row, status)


def launch(
    member_logits: list[Tensor],
    *,
    draft_tokens: Tensor | None = None,
    parents: Tensor | None = None,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    first_token: int = 0,
    count: int = 1,
    **options: Any,
) -> list[Tensor]:
    """`best_of_shard`: a lone model or a mixture of logits without plausibility, not filtered."""
    ready, steps = ready_for_kernels(target_of(member_logits, options)), member_logits[0].shape[1]
    target = target_view(ready, steps, draft_tokens)
    if parents is not None and target.edits is not None:
        target = target._replace(edits=target.edits._replace(parents=parents))
    best, statistics = new_best(target, count), new_statistics(target, DraftView())
    scores = score_view(target, statistics, seeds, positions, False)
    scores = scores._replace(first_block=first_token // NOISE_BLOCK.value)
    run(launches(best, scores, statistics, target), best.logits)
    return list(best[:3])


def new_best(target: TargetView, count: int = 1) -> ShardBest:
    """Unwritten."""
    status = torch.empty(batch_of(target), target.steps, dtype=torch.int32, device=target.logits[0].device)
    logits = status.new_empty(*status.shape, count, dtype=torch.float64)
    size = tl.constexpr(triton.next_power_of_2(count))
    return ShardBest(logits, torch.empty_like(logits, dtype=torch.int64), status, count, size)


def launches(best: ShardBest, scores: ScoreView, statistics: Statistics, target: TargetView) -> Iterator[Launch]:
    yield from pass_launches(scores, statistics, target, DraftView(draft_len=target.steps - 1))  # all rows are read
    arguments = {"best": best, "scores": scores, "statistics": statistics, "target": target}
    mixed = not scores.LONE.value  # what is found is mixed once more
    yield search_launch(_shard_kernel, batch_of(target) * target.steps, arguments, scores, target, mixed)
