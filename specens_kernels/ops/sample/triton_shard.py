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
    """What is written of each row, [batch, steps]: as `best_of_shard` of C++ does."""

    logits: Tensor  # float64, that of the best token, or the sum of weighted ones; -inf where there is no token
    tokens: Tensor  # int64, as the part counts them, -1 for none
    status: Tensor  # int32


BEST_TYPES = (torch.float64, torch.int64, torch.int32)


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
    value = tl.full([], -INFINITY, tl.float64)
    token = tl.full([], -1, tl.int64)
    status = tl.full([], 0, tl.int32)
    if target_is_valid(target, request):
        position = row
        if scores.HAS_SEEDS:
            position = tl.load(scores.positions + row)
        found, chosen, bits = search_scores(scores, statistics, target, request, step, position, 1, 1)
        there = found > -INFINITY
        chosen = tl.where(there, chosen, 0)
        logits = score_logits(scores, target, request, step, chosen, -INFINITY).logits
        value = tl.max(tl.where(there, logits.to(tl.float64), -INFINITY), 0)
        token = tl.max(tl.where(there, chosen, -1), 0).to(tl.int64)
        status = bits.to(tl.int32) & ~NO_TOKEN
    tl.store(best.logits + row, value)
    tl.store(best.tokens + row, token)
    tl.store(best.status + row, status)


def launch(
    member_logits: list[Tensor],
    *,
    draft_tokens: Tensor | None = None,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    first_token: int = 0,
    **options: Any,
) -> list[Tensor]:
    """`best_of_shard`: a lone model or a mixture of logits without plausibility, not filtered."""
    ready, steps = ready_for_kernels(target_of(member_logits, options)), member_logits[0].shape[1]
    target = target_view(ready, steps, draft_tokens)
    best, statistics = new_best(target), new_statistics(target, DraftView())
    scores = score_view(target, statistics, seeds, positions, False)
    scores = scores._replace(first_block=first_token // NOISE_BLOCK.value)
    run(launches(best, scores, statistics, target), best.logits)
    return list(best)


def new_best(target: TargetView) -> ShardBest:
    """Unwritten."""
    shape, device = (batch_of(target), target.steps), target.logits[0].device
    return ShardBest(*(torch.empty(shape, dtype=dtype, device=device) for dtype in BEST_TYPES))


def launches(best: ShardBest, scores: ScoreView, statistics: Statistics, target: TargetView) -> Iterator[Launch]:
    yield from pass_launches(scores, statistics, target, DraftView(draft_len=target.steps - 1))  # all rows are read
    arguments = {"best": best, "scores": scores, "statistics": statistics, "target": target}
    mixed = not scores.LONE.value  # what is found is mixed once more
    yield search_launch(_shard_kernel, batch_of(target) * target.steps, arguments, scores, target, mixed)
