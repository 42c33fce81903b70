"""The tokens of the best Gumbel scores on a GPU: a pass that keeps the largest logit of each block, then the blocks
that can hold one of them, a program for each row. The last one of a chain's rows judges its drafts.

A lone model and a mixture of logits need no probabilities. Of filtered targets and of mixtures the statistics are read
first, as for a draw; blocks are theirs then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specens_kernels.ops.target_logprobs.triton_edits import edit_launch
from specens_kernels.ops.target_logprobs.triton_kernel import statistics_launches
from specens_kernels.parts.chain import INVALID_DRAFT_TOKEN, INVALID_PARAMETER, load_draft_tokens
from specens_kernels.parts.draft import DraftView, chain_len, drafts_are_valid, row_count, row_is_read
from specens_kernels.parts.gumbel import NOISE_BLOCK
from specens_kernels.parts.launches import Launch, wait_for_launch_before
from specens_kernels.parts.sampling import INFINITY
from specens_kernels.parts.score_search import search_scores
from specens_kernels.parts.scores import ScoreView, score_logits
from specens_kernels.parts.states import log_probability, target_state
from specens_kernels.parts.statistics import NOWHERE, Statistics
from specens_kernels.parts.target import TargetView, batch_of, mixes_many, raw_logits, target_is_valid

PASS_WARPS, OTHER_PASS_WARPS, SEARCH_WARPS = 4, 8, 8  # 32, 16 and 4 tokens a thread, which is what registers hold
SEARCH_REGISTERS = 255  # of a thread that holds many: the compiler takes 128 for two programs at once, and spills


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
    steps: int  # of a chain: programs a request, at least one
    COLUMNS: tl.constexpr  # the power of two from `columns`
    BEST: tl.constexpr  # of a draw: the power of two from how many tokens are wanted, as many as columns
    row_tokens: Tensor | None  # of a chain: int32 [batch, steps]; what its rows find
    row_bits: Tensor | None  # int32 [batch, steps]
    row_logprobs: Tensor | None  # float32 [batch, steps]
    CHAIN: tl.constexpr
    TOLD: tl.constexpr


def chain_found(results: Sequence[Tensor], steps: int, told: bool) -> Found:
    """What is written of the results of `verify_chain`. told: whether log-probabilities under the target are."""
    tokens, num_accepted, num_tokens, next_token, status, *reported = results
    (batch, columns), steps = tokens.shape, max(steps, 1)
    row_tokens = torch.empty(batch, steps, dtype=torch.int32, device=tokens.device)
    return Found(
        tokens=tokens,
        logprobs=reported[0] if told else None,
        num_accepted=num_accepted,
        num_tokens=num_tokens,
        next_token=next_token,
        status=status,
        columns=columns,
        first_step=0,
        steps=steps,
        COLUMNS=tl.constexpr(triton.next_power_of_2(max(columns, steps))),
        BEST=tl.constexpr(1),
        row_tokens=row_tokens,
        row_bits=torch.empty_like(row_tokens),
        row_logprobs=torch.empty_like(row_tokens, dtype=torch.float32) if told else None,
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
        steps=1,
        COLUMNS=tl.constexpr(1),
        BEST=tl.constexpr(triton.next_power_of_2(columns)),
        row_tokens=None,
        row_bits=None,
        row_logprobs=None,
        CHAIN=tl.constexpr(False),
        TOLD=tl.constexpr(logprobs is not None),
    )


@triton.jit
def _block_maxima(scores, logits):
    """The largest of each block of a tile."""
    return tl.max(tl.reshape(logits, [scores.TILE // NOISE_BLOCK, NOISE_BLOCK]), 1)


@triton.jit
def _maxima_kernel(
    scores,  # ScoreView, written
    target,  # TargetView
    draft,  # DraftView
    DEPENDENT: tl.constexpr,
):
    wait_for_launch_before(DEPENDENT)
    row = tl.program_id(0)
    tile = tl.program_id(1)
    request = (row // target.steps).to(tl.int64)
    step = (row % target.steps).to(tl.int64)
    if scores.arrived is not None:  # noqa: SIM102 - decided when compiling
        if (step == 0) & (tile == 0):
            tl.store(scores.arrived + request, 0)
    if not row_is_read(target, draft, request, step):
        return
    tokens = tile * scores.TILE + tl.arange(0, scores.TILE)
    if scores.LONE:
        # NaN and +inf show in the maximum: the search reads such a block again
        raw = raw_logits(target, 0, request, step, tokens, tokens >= 0)
        maxima = _block_maxima(scores, tl.where(raw == raw, raw, INFINITY))
    else:
        found = score_logits(scores, target, request, step, tokens, -INFINITY)
        maxima = _block_maxima(scores, found.logits)
        nearest = maxima.to(tl.float32)
        upwards = nearest + tl.abs(nearest) * 1.3e-7 + 1e-37
        maxima = tl.where(nearest.to(tl.float64) < maxima, upwards, nearest)
        index = row.to(tl.int64) * scores.tiles + tile
        tl.store(scores.marks + index, tl.reduce_or(found.marks, 0).to(tl.int8))
        if target.log_plausibility is not None:
            tl.store(scores.first_maxima + index, tl.max(found.first, 0))
    block = tile * (scores.TILE // NOISE_BLOCK) + tl.arange(0, scores.TILE // NOISE_BLOCK)
    tl.store(scores.maxima + row.to(tl.int64) * scores.blocks + block, maxima, mask=block < scores.blocks)


@triton.jit
def _target_logprob(statistics, target, request, step, token):
    """The log-probability of a token under the target, float32; 0 for none."""
    rows = tl.zeros([1], tl.int64) + request * target.steps + step
    state, _ = target_state(statistics, target, request, rows, rows >= 0)
    tokens = (rows & 0) + token
    own = log_probability(statistics, target, state, request, step, tokens, tokens >= 0, tl.float64)
    return tl.where(token >= 0, tl.max(own, 0), 0.0).to(tl.float32)


class ChainRows(NamedTuple):
    """What there is of a request, in a kernel; nothing where it is not valid."""

    length: Any  # of its drafts, int64
    count: Any  # of its rows, int64
    valid: Any


@triton.jit
def _chain_rows(target, draft, request):
    """The ChainRows of a request."""
    valid = target_is_valid(target, request) & drafts_are_valid(draft, request)
    length = tl.where(valid, chain_len(draft, request), 0)
    return ChainRows(length, tl.where(valid, row_count(target, draft, request, length), 0), valid)


@triton.jit
def _judge_chain(found, target, draft, request):
    """Write a request's verdict from the tokens of its rows."""
    length, rows, valid = _chain_rows(target, draft, request)
    column = tl.arange(0, found.COLUMNS)
    steps = column.to(tl.int64)
    # other programs wrote these: past the first cache
    index = request * found.steps + column
    tokens = tl.load(found.row_tokens + index, mask=column < rows, other=-1, cache_modifier=".cg").to(tl.int64)
    bits = tl.load(found.row_bits + index, mask=column < rows, other=0, cache_modifier=".cg")
    drafted = load_draft_tokens(draft, request, steps, column < length)
    known = (column >= length) | ((drafted >= 0) & (drafted < target.vocab))
    accepted = (column < length) & known & (drafted == tokens)
    num_accepted = tl.min(tl.where(accepted, found.COLUMNS, column), 0).to(tl.int64)
    next_token = tl.max(tl.where((column == num_accepted) & (column < rows), tokens, -1), 0)
    emitted = num_accepted + (next_token >= 0).to(tl.int64)
    bits |= tl.where(known, 0, INVALID_DRAFT_TOKEN)
    status = tl.reduce_or(tl.where((column <= num_accepted) & (column < rows), bits, 0), 0)
    first, used = request * found.columns, column < found.columns
    tl.store(found.tokens + first + column, tl.where(column < emitted, tokens, -1), mask=used)
    if found.TOLD:
        logprobs = tl.load(found.row_logprobs + index, mask=column < emitted, other=0.0, cache_modifier=".cg")
        tl.store(found.logprobs + first + column, logprobs, mask=used)
    tl.store(found.num_accepted + request, num_accepted)
    tl.store(found.num_tokens + request, emitted)
    tl.store(found.next_token + request, next_token)
    tl.store(found.status + request, tl.where(valid, status, INVALID_PARAMETER))


@triton.jit
def _row_kernel(
    found,  # Found, its rows written, and the rest by the last program of a request
    scores,  # ScoreView
    statistics,  # Statistics
    target,  # TargetView
    draft,  # DraftView
    DEPENDENT: tl.constexpr,
):
    wait_for_launch_before(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    request = row // found.steps
    step = row % found.steps
    if step < _chain_rows(target, draft, request).count:
        position = step
        if scores.HAS_SEEDS:
            position += tl.load(scores.positions + request)
        best, chosen, bits = search_scores(scores, statistics, target, request, step, position, 1, 1)
        token = tl.max(tl.where(best > -INFINITY, chosen, -1), 0)
        tl.store(found.row_tokens + row, token)
        tl.store(found.row_bits + row, bits)
        if found.TOLD:
            own = _target_logprob(statistics, target, request, step, token.to(tl.int64))
            tl.store(found.row_logprobs + row, own)
    # releases what this program has stored, and acquires what those before it have
    if tl.atomic_add(scores.arrived + request, 1) == found.steps - 1:
        _judge_chain(found, target, draft, request)


@triton.jit
def _draw_kernel(
    found,  # Found, written
    scores,  # ScoreView
    statistics,  # Statistics
    target,  # TargetView
    DEPENDENT: tl.constexpr,
):
    wait_for_launch_before(DEPENDENT)
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
    after = tl.cumsum((used & (tokens < 0)).to(tl.int32), 0) - 1
    rank = tl.where(tokens < 0, tl.sum((used & (tokens >= 0)).to(tl.int32), 0) + after, rank)
    tl.store(found.tokens + request * found.columns + rank, tokens, mask=used)
    tl.store(found.status + request, status)
    if found.TOLD:
        for other in range(found.columns):
            token = tl.max(tl.where(column == other, tokens, -1), 0)
            index = tl.max(tl.where(column == other, rank, 0), 0)
            own = _target_logprob(statistics, target, request, request * 0, token)
            tl.store(found.logprobs + request * found.columns + index, own)


def pass_launches(scores: ScoreView, statistics: Statistics, target: TargetView, draft: DraftView) -> Iterator[Launch]:
    """The pass; statistics instead of it, or before it, where they are needed."""
    if scores.FROM_STATISTICS.value or scores.TOLD.value:
        yield from statistics_launches(statistics, target, draft)
    elif target.edits is not None:
        yield edit_launch(target.edits)
    if not scores.FROM_STATISTICS.value:
        grid = (batch_of(target) * target.steps, scores.tiles)
        plain = scores.LONE.value and target.edits is None and target.mask is None
        warps = PASS_WARPS if plain else OTHER_PASS_WARPS
        yield Launch(_maxima_kernel, grid, {"scores": scores, "target": target, "draft": draft}, warps)


def launches(
    found: Found, scores: ScoreView, statistics: Statistics, target: TargetView, draft: DraftView
) -> Iterator[Launch]:
    """Two launches: the pass, and what decides."""
    yield from pass_launches(scores, statistics, target, draft)
    arguments = {"found": found, "scores": scores, "statistics": statistics, "target": target}
    if found.CHAIN.value:
        rows = batch_of(target) * found.steps
        yield search_launch(_row_kernel, rows, arguments | {"draft": draft}, scores, target)
    else:
        yield search_launch(_draw_kernel, batch_of(target), arguments, scores, target)


def search_launch(
    kernel: Any, programs: int, arguments: dict[str, Any], scores: ScoreView, target: TargetView, more: bool = False
) -> Launch:
    """A kernel that searches: edits are looked up, logarithms of probabilities are sums, and tokens are plausible or
    not, with many numbers, as where many logits are mixed.

    more: whether the kernel itself holds many.
    """
    many = more or target.edits is not None or target.log_plausibility is not None
    many = many or not scores.EXACT.value or mixes_many(target)
    return Launch(kernel, (programs,), arguments, SEARCH_WARPS, SEARCH_REGISTERS if many else None)


SCORE_KERNELS = (_maxima_kernel, _row_kernel, _draw_kernel)
