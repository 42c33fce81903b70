"""Log-probabilities of the slices of rows on a GPU, the likeliest tokens among them, and the rows' entropies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specens_kernels.ops.target_logprobs.triton_kernel import BLOCK_WARPS
from specens_kernels.ops.verify_chain.triton_shard_rows import (
    ShardPlaces,
    Views,
    edit_launches,
    places_of,
    residual_of,
    row_at,
    row_states,
    sums_at,
    views,
)
from specens_kernels.parts.launches import Launch, run, wait_for_launch_before
from specens_kernels.parts.sampling import INFINITY, over_temperature
from specens_kernels.parts.statistics import NOWHERE, first_of, tokens_of
from specens_kernels.parts.target import member_weight, part_logits, target_is_valid, target_temperature


class Scale(NamedTuple):
    """What makes log-probabilities of logits, float64 [batch, steps, parts]."""

    largest: Tensor  # the row's largest logit
    log_totals: Tensor  # the logarithm of its mass, relative to that of the largest


@triton.jit
def shard_entropy_kernel(
    blocks_ptr,  # float64 [batch, count, blocks], written
    places,  # ShardPlaces
    statistics,  # Statistics
    target,  # TargetView
    draft,  # DraftView
    DEPENDENT: tl.constexpr,
):
    wait_for_launch_before(DEPENDENT)
    place = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    request, step, usable = row_at(places, target, place)
    blocks_ptr += place * statistics.blocks + block
    if not usable:
        tl.store(blocks_ptr, 0.0)
        return
    never = step < 0
    states = row_states(places, statistics, target, draft, request, tl.zeros([1], tl.int64) + step, step, never)
    tokens = tokens_of(statistics, block)
    masses = residual_of(places, statistics, target, draft, states, request, place, step, tokens, never, never)
    tl.store(blocks_ptr, -tl.sum(masses * tl.log(tl.where(masses > 0, masses, 1.0)), 0).to(tl.float64))


@triton.jit
def _logprobs(places, scale, statistics, target, request, step, tokens, used, DTYPE: tl.constexpr):
    """The target's log-probabilities of tokens of a row, -inf where it has none."""
    first = (request * target.steps + step) * (statistics.PARTS + 1)
    rate = over_temperature(1.0, target_temperature(target, request)).to(DTYPE)
    total = tl.full([], 0.0, tl.float32)
    for part in tl.static_range(statistics.PARTS):
        if target.MIXTURE:
            alive = tl.load(places.masses + first + part) >= 0
            total += tl.where(alive, member_weight(target, request, part), 0.0)
    logprobs = tl.zeros(tokens.shape, DTYPE) - INFINITY
    for part in tl.static_range(statistics.PARTS):
        logits = part_logits(target, part, request, step, tokens, used, -INFINITY)
        if places.least is not None:
            logits = tl.where(logits >= tl.load(places.least + first + part), logits, -INFINITY)
        largest = tl.load(scale.largest + first + part).to(DTYPE)
        shift = tl.load(scale.log_totals + first + part).to(DTYPE)
        alive = tl.load(places.masses + first + part) >= 0
        if target.MIXTURE:
            weight = member_weight(target, request, part).to(DTYPE)
            alive &= weight > 0
            shift -= tl.log(tl.where(alive, weight, 1.0)) - tl.log(tl.where(total > 0, total, 1.0).to(DTYPE))
        own = (logits.to(DTYPE) - tl.where(alive, largest, 0.0)) * rate - tl.where(alive, shift, 0.0)
        own = tl.where(alive, own, -INFINITY)
        if statistics.PARTS == 1:
            logprobs = own
        else:
            larger = tl.maximum(logprobs, own)
            centre = tl.where(larger > -INFINITY, larger, 0.0)
            powers = tl.exp(logprobs - centre) + tl.exp(own - centre)
            logprobs = tl.where(larger > -INFINITY, centre + tl.log(tl.maximum(powers, 1.0)), -INFINITY)
    return tl.minimum(logprobs, 0.0)


@triton.jit
def _reported_row(places, target, place):
    """The request and step of a place, and whether there is a row."""
    request = place // places.count
    step = tl.load(places.rows + place)
    return request, step, (step < target.steps) & target_is_valid(target, request)


@triton.jit
def _shard_logprobs_kernel(
    logprobs_ptr,  # float32 [batch, count, vocab], written
    places,  # ShardPlaces
    scale,  # Scale
    statistics,  # Statistics
    target,  # TargetView
    DEPENDENT: tl.constexpr,
):
    wait_for_launch_before(DEPENDENT)
    place = tl.program_id(0).to(tl.int64)
    request, step, there = _reported_row(places, target, place)
    tokens = tokens_of(statistics, tl.program_id(1))
    logprobs = tl.zeros(tokens.shape, tl.float32) - INFINITY
    if there:
        logprobs = _logprobs(places, scale, statistics, target, request, step, tokens, tokens >= 0, tl.float32)
    tl.store(logprobs_ptr + place * target.vocab + tokens, logprobs, mask=tokens < target.vocab)


@triton.jit
def _shard_top_kernel(
    values_ptr,  # float64 [batch, count, blocks, top], written: the likeliest of each block, then -inf
    tokens_ptr,  # int64 likewise, -1
    places,  # ShardPlaces
    scale,  # Scale
    top,
    statistics,  # Statistics
    target,  # TargetView
    DEPENDENT: tl.constexpr,
):
    wait_for_launch_before(DEPENDENT)
    place = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    request, step, there = _reported_row(places, target, place)
    tokens = tokens_of(statistics, block)
    logprobs = tl.zeros(tokens.shape, tl.float64) - INFINITY
    if there:
        logprobs = _logprobs(places, scale, statistics, target, request, step, tokens, tokens >= 0, tl.float64)
    at = (place * statistics.blocks + block) * top
    for rank in range(top):
        best = tl.max(logprobs, 0)
        token = first_of(logprobs, best, tokens)
        tl.store(values_ptr + at + rank, best)
        tl.store(tokens_ptr + at + rank, tl.where(token < NOWHERE, token, -1).to(tl.int64))
        logprobs = tl.where(tokens == token, -INFINITY, logprobs)


@triton.jit
def _shard_score_kernel(
    scores_ptr,  # float64 [batch, count], written
    tokens_ptr,  # int64 [batch, count]
    places,  # ShardPlaces
    scale,  # Scale
    statistics,  # Statistics
    target,  # TargetView
    DEPENDENT: tl.constexpr,
):
    wait_for_launch_before(DEPENDENT)
    place = tl.program_id(0).to(tl.int64)
    request, step, there = _reported_row(places, target, place)
    token = tl.zeros([1], tl.int64) + tl.load(tokens_ptr + place)
    used = (token >= 0) & (token < target.vocab)
    scores = tl.zeros([1], tl.float64) - INFINITY
    if there:
        scores = _logprobs(places, scale, statistics, target, request, step, token, used, tl.float64)
    tl.store(scores_ptr + place + tl.arange(0, 1), tl.where(used, scores, -INFINITY))


def entropies(*given: Any, **options: Any) -> Tensor:
    """`entropies_of_shard`."""
    return sums_at(shard_entropy_kernel, *given, **options)


def logprobs(
    member_logits: list[Tensor],
    draft_tokens: Tensor,
    row_of: Tensor,
    shares: Tensor,
    masses: Tensor,
    state: Tensor,
    largest: Tensor,
    log_totals: Tensor,
    *,
    least: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """`logprobs_of_shard`."""
    own = views(member_logits, draft_tokens, options, state)
    found = masses.new_empty(*row_of.shape, own.target.vocab, dtype=torch.float32)
    run(logprob_launches(found, places_of(row_of, shares, masses, least), Scale(largest, log_totals), own), found)
    return found


def logprob_launches(found: Tensor, places: ShardPlaces, scale: Scale, own: Views) -> Iterator[Launch]:
    yield from edit_launches(own)
    grid = found.shape[0] * found.shape[1], own.statistics.blocks
    arguments = {"logprobs_ptr": found, "places": places, "scale": scale}
    arguments |= {"statistics": own.statistics, "target": own.target}
    yield Launch(_shard_logprobs_kernel, grid, arguments, BLOCK_WARPS)


def top(
    member_logits: list[Tensor],
    draft_tokens: Tensor,
    row_of: Tensor,
    shares: Tensor,
    masses: Tensor,
    state: Tensor,
    largest: Tensor,
    log_totals: Tensor,
    count: int,
    *,
    least: Tensor | None = None,
    **options: Any,
) -> list[Tensor]:
    """`top_of_shard`."""
    own = views(member_logits, draft_tokens, options, state)
    values = masses.new_empty(*row_of.shape, own.statistics.blocks, count)
    tokens = torch.empty_like(values, dtype=torch.int64)
    places = places_of(row_of, shares, masses, least)
    run(top_launches(values, tokens, places, Scale(largest, log_totals), own), values)
    best, order = values.flatten(2).sort(dim=-1, descending=True, stable=True)  # blocks lie in the order of tokens
    return [best[..., :count].contiguous(), tokens.flatten(2).gather(-1, order[..., :count])]


def top_launches(values: Tensor, tokens: Tensor, places: ShardPlaces, scale: Scale, own: Views) -> Iterator[Launch]:
    yield from edit_launches(own)
    arguments = {"values_ptr": values, "tokens_ptr": tokens, "places": places, "scale": scale}
    arguments |= {"top": values.shape[-1], "statistics": own.statistics, "target": own.target}
    yield Launch(_shard_top_kernel, (values.shape[0] * values.shape[1], values.shape[2]), arguments, BLOCK_WARPS)


def scores(
    member_logits: list[Tensor],
    draft_tokens: Tensor,
    row_of: Tensor,
    shares: Tensor,
    masses: Tensor,
    state: Tensor,
    largest: Tensor,
    log_totals: Tensor,
    tokens: Tensor,
    *,
    least: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """`scores_of_shard`."""
    own = views(member_logits, draft_tokens, options, state)
    found, places = masses.new_empty(row_of.shape), places_of(row_of, shares, masses, least)
    run(score_launches(found, tokens, places, Scale(largest, log_totals), own), found)
    return found


def score_launches(found: Tensor, tokens: Tensor, places: ShardPlaces, scale: Scale, own: Views) -> Iterator[Launch]:
    yield from edit_launches(own)
    arguments = {"scores_ptr": found, "tokens_ptr": tokens, "places": places, "scale": scale}
    arguments |= {"statistics": own.statistics, "target": own.target}
    yield Launch(_shard_score_kernel, (found.numel(),), arguments, 1)
