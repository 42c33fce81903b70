"""The tokens of the best Gumbel scores on a GPU: a pass that keeps the largest logit of each block, then the blocks
that can hold one of them, a program for each request.

A lone model and a mixture of logits need no probabilities. Of filtered targets and of mixtures the statistics are read
first, as for a draw; blocks are theirs then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from specens_kernels.ops.target_logprobs.triton_edits import edit_launch
from specens_kernels.ops.target_logprobs.triton_kernel import statistics_launches
from specens_kernels.parts.chain import INVALID_DRAFT_TOKEN, INVALID_PARAMETER, load_draft_tokens
from specens_kernels.parts.draft import DraftView, chain_len, draft_temperature, row_count, row_is_read
from specens_kernels.parts.gumbel import NOISE_BLOCK
from specens_kernels.parts.launches import Launch
from specens_kernels.parts.sampling import INFINITY
from specens_kernels.parts.score_search import search_scores
from specens_kernels.parts.scores import ScoreView, score_logits
from specens_kernels.parts.states import log_probability, target_state
from specens_kernels.parts.statistics import NOWHERE, Statistics, union
from specens_kernels.parts.target import TargetView, batch_of, everywhere, target_is_valid

PASS_WARPS, DECIDE_WARPS = 8, 16


class Found(NamedTuple):
    """What is written of a chain, or of draws, a column a token; None where it is not asked for."""

    tokens: Tensor  # int64 [batch, columns]
    logprobs: Tensor | None  # float32 [batch, columns]
    num_accepted: Tensor | None  # int64 [batch]
    num_tokens: Tensor | None
    next_token: Tensor | None
    status: Tensor  # int32 [batch]
    columns: int
    first_step: int  # of the position of row 0
    COLUMNS: tl.constexpr  # the power of two from `columns`
    BEST: tl.constexpr  # of a draw: the power of two from how many tokens are wanted, as many as columns
    CHAIN: tl.constexpr
    TOLD: tl.constexpr


def chain_found(results: Sequence[Tensor], told: bool) -> Found:
    """What is written of the results of `verify_chain`. told: whether log-probabilities under the target are."""
    tokens, num_accepted, num_tokens, next_token, status, *reported = results
    columns = tokens.shape[1]
    return Found(
        tokens=tokens,
        logprobs=reported[0] if told else None,
        num_accepted=num_accepted,
        num_tokens=num_tokens,
        next_token=next_token,
        status=status,
        columns=columns,
        first_step=0,
        COLUMNS=tl.constexpr(triton.next_power_of_2(columns)),
        BEST=tl.constexpr(1),
        CHAIN=tl.constexpr(True),
        TOLD=tl.constexpr(told),
    )


def draw_found(tokens: Tensor, logprobs: Tensor | None, status: Tensor, step: int) -> Found:
    """What is written of draws, `tokens` [batch, best]."""
    columns = tokens.shape[1]
    return Found(
        tokens=tokens,
        logprobs=logprobs,
        num_accepted=None,
        num_tokens=None,
        next_token=None,
        status=status,
        columns=columns,
        first_step=step,
        COLUMNS=tl.constexpr(1),
        BEST=tl.constexpr(triton.next_power_of_2(columns)),
        CHAIN=tl.constexpr(False),
        TOLD=tl.constexpr(logprobs is not None),
    )


@triton.jit
def _maxima_kernel(
    scores,  # ScoreView, its maxima and marks written
    target,  # TargetView
    draft,  # DraftView
):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    request = row // target.steps
    step = row % target.steps
    if not row_is_read(target, draft, request, step):
        return
    tokens = tile * scores.TILE + tl.arange(0, scores.TILE)
    logits, marks, first = score_logits(scores, target, request, step, tokens, -INFINITY)
    maxima = tl.max(tl.reshape(logits, [scores.TILE // NOISE_BLOCK, NOISE_BLOCK]), 1)
    if not scores.LONE:
        nearest = maxima.to(tl.float32)
        upwards = nearest + tl.abs(nearest) * 1.3e-7 + 1e-37
        maxima = tl.where(nearest.to(tl.float64) < maxima, upwards, nearest)
    block = tile * (scores.TILE // NOISE_BLOCK) + tl.arange(0, scores.TILE // NOISE_BLOCK)
    tl.store(scores.maxima + row * scores.blocks + block, maxima, mask=block < scores.blocks)
    tl.store(scores.marks + row * scores.tiles + tile, union(marks, 0, 16).to(tl.int8))
    if target.log_plausibility is not None:
        tl.store(scores.first_maxima + row * scores.tiles + tile, tl.max(first, 0))


@triton.jit
def _target_logprob(statistics, target, request, step, token):
    """The log-probability of a token under the target, float32; 0 for none."""
    rows = tl.zeros([1], tl.int64) + request * target.steps + step
    state, _ = target_state(statistics, target, request, rows, rows >= 0)
    tokens = (rows & 0) + token
    own = log_probability(statistics, target, state, request, step, tokens, tokens >= 0, tl.float64)
    return tl.where(token >= 0, tl.max(own, 0), 0.0).to(tl.float32)


@triton.jit
def _chain_kernel(
    found,  # Found, written
    scores,  # ScoreView, written
    statistics,  # Statistics
    target,  # TargetView
    draft,  # DraftView
):
    request = tl.program_id(0).to(tl.int64)
    heat = draft_temperature(draft, request)
    length = chain_len(draft, request)
    valid = target_is_valid(target, request) & (heat >= 0) & (heat < INFINITY)
    valid &= (length >= 0) & (length <= draft.draft_len)
    length = tl.where(valid, length, 0)
    rows = tl.where(valid, row_count(target, draft, request, length), 0)
    first = request * found.columns
    step = request * 0
    num_accepted = step
    next_token = step - 1
    status = tl.where(valid, 0, INVALID_PARAMETER)
    going = rows > 0
    while going:
        position = step
        if scores.HAS_SEEDS:
            position += tl.load(scores.positions + request)
        best, chosen, bits = search_scores(scores, statistics, target, request, step, position, 1, 1)
        token = tl.max(tl.where(best > -INFINITY, chosen, -1), 0).to(tl.int64)
        steps = tl.zeros([1], tl.int64) + step
        drafted = tl.max(load_draft_tokens(draft, request, steps, everywhere(step < length, steps)), 0)
        known = (drafted >= 0) & (drafted < target.vocab)
        status |= bits | tl.where((step < length) & (known == 0), INVALID_DRAFT_TOKEN, 0)
        accepted = known & (drafted == token)
        tl.store(found.tokens + first + step, token)
        if found.TOLD:
            tl.store(found.logprobs + first + step, _target_logprob(statistics, target, request, step, token))
        num_accepted += accepted.to(tl.int64)
        next_token = tl.where(accepted, -1, token)
        step += 1
        going = accepted & (step < rows)
    emitted = num_accepted + (next_token >= 0).to(tl.int64)
    column = tl.arange(0, found.COLUMNS)
    padding = (column >= emitted) & (column < found.columns)
    tl.store(found.tokens + first + column, tl.zeros([found.COLUMNS], tl.int64) - 1, mask=padding)
    if found.TOLD:
        tl.store(found.logprobs + first + column, tl.zeros([found.COLUMNS], tl.float32), mask=padding)
    tl.store(found.num_accepted + request, num_accepted)
    tl.store(found.num_tokens + request, emitted)
    tl.store(found.next_token + request, next_token)
    tl.store(found.status + request, status)


@triton.jit
def _draw_kernel(
    found,  # Found, written
    scores,  # ScoreView, written
    statistics,  # Statistics
    target,  # TargetView
):
    request = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, found.BEST)
    best = tl.zeros([found.BEST], tl.float64) - INFINITY
    chosen = tl.zeros([found.BEST], tl.int32) + NOWHERE
    status = INVALID_PARAMETER
    if target_is_valid(target, request):
        position = request * 0 + found.first_step
        if scores.HAS_SEEDS:
            position += tl.load(scores.positions + request)
        best, chosen, status = search_scores(
            scores, statistics, target, request, request * 0, position, found.BEST, found.columns
        )
    rank = tl.zeros([found.BEST], tl.int32)  # of each among those that are wanted
    for other in range(found.columns):
        score = tl.max(tl.where(column == other, best, -INFINITY), 0)
        token = tl.max(tl.where(column == other, chosen, -1), 0)
        rank += ((score > best) | ((score == best) & (token < chosen))).to(tl.int32)
    used = column < found.columns
    tokens = tl.where(best > -INFINITY, chosen, -1).to(tl.int64)
    # those that are none share a rank
    behind = tl.cumsum((used & (tokens < 0)).to(tl.int32), 0) - 1
    rank = tl.where(tokens < 0, tl.sum((used & (tokens >= 0)).to(tl.int32), 0) + behind, rank)
    tl.store(found.tokens + request * found.columns + rank, tokens, mask=used)
    tl.store(found.status + request, status)
    if found.TOLD:
        for other in range(found.columns):
            token = tl.max(tl.where(column == other, tokens, -1), 0)
            place = tl.max(tl.where(column == other, rank, 0), 0)
            own = _target_logprob(statistics, target, request, request * 0, token)
            tl.store(found.logprobs + request * found.columns + place, own)


def pass_launches(scores: ScoreView, statistics: Statistics, target: TargetView, draft: DraftView) -> Iterator[Launch]:
    """The pass; statistics instead of it, or before it, where they are needed."""
    if scores.FROM_STATISTICS.value or scores.TOLD.value:
        yield from statistics_launches(statistics, target, draft)
    elif target.edits is not None:
        yield edit_launch(target.edits)
    if not scores.FROM_STATISTICS.value:
        grid = (batch_of(target) * target.steps, scores.tiles)
        yield Launch(_maxima_kernel, grid, {"scores": scores, "target": target, "draft": draft}, PASS_WARPS)


def launches(
    found: Found, scores: ScoreView, statistics: Statistics, target: TargetView, draft: DraftView
) -> Iterator[Launch]:
    """Two launches: the pass, and what decides."""
    yield from pass_launches(scores, statistics, target, draft)
    kernel = _chain_kernel if found.CHAIN.value else _draw_kernel
    arguments = {"found": found, "scores": scores, "statistics": statistics, "target": target, "draft": draft}
    if not found.CHAIN.value:
        del arguments["draft"]
    yield Launch(kernel, (batch_of(target),), arguments, DECIDE_WARPS)


SCORE_KERNELS = (_maxima_kernel, _chain_kernel, _draw_kernel)
