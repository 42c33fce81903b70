"""What filters search the slices of rows for on a GPU: the largest logits, and sums over tokens of a prefix of a key.

Each program reads a block of tokens of a row once; what blocks have found comes together in torch. Where keys of 32
bits are searched, a launch writes down the logits that are, as float32, and torch sorts them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specens_kernels.arguments import draft_of, target_of
from specens_kernels.ops.target_logprobs.reference import parameters
from specens_kernels.ops.target_logprobs.triton_kernel import BLOCK_WARPS
from specens_kernels.ops.verify_chain.triton_shard_rows import (
    ShardPlaces,
    Views,
    block_maximum,
    draft_values,
    drafted_at,
    edit_launches,
    keeps_of_block,
    places_of,
    row_at,
    views,
)
from specens_kernels.parts.draft import draft_temperature, drafter_of
from specens_kernels.parts.gumbel import token_noise
from specens_kernels.parts.keys import key_of, value_of
from specens_kernels.parts.launches import Launch, run, wait_for_launch_before
from specens_kernels.parts.sampling import FLOAT_MAX, INFINITY, logit_scale
from specens_kernels.parts.statistics import NOWHERE, tokens_of
from specens_kernels.parts.target import batch_of, part_logits, target_is_valid, target_temperature
from specens_kernels.parts.written_tokens import OF_FLOAT32, Bracket, WrittenTokens

DIGIT = tl.constexpr(8)  # bits of a key that sums are told apart by
BUCKETS = tl.constexpr(256)
AT_ONCE = tl.constexpr(64)  # tokens that a program adds to its buckets
SCORED_AT_ONCE = tl.constexpr(256)  # tokens that a program scores
HALF_MAX = tl.constexpr(65504.0)
HALVINGS = tl.constexpr(33)  # of the range of float32 keys


class Searched(NamedTuple):
    """Rows of parts of the target, one part after the other, or of drafts."""

    masses: Tensor  # float64 [batch, steps, parts]; negative: no token
    rows: int  # of a request
    OF_DRAFTS: tl.constexpr


class Weights(NamedTuple):
    """What is summed."""

    largest: Tensor  # float64 [batch, rows], the logit that has the mass 1
    least: Tensor  # float32 [batch, rows], of the logits
    prefix: Tensor  # int64 [batch, rows], of the keys
    shift: int  # of the digit after it
    HALF: tl.constexpr  # keys of float16, else of bfloat16
    COUNTS: tl.constexpr  # each token counts 1


class Noise(NamedTuple):
    """Where the Gumbel noise of rows comes from."""

    seeds: Tensor  # int64 [batch]
    positions: Tensor  # int64 [batch, places]
    largest: Tensor  # float64 [batch, places], a logit near which scores are told apart best
    first_token: int  # of the slice, in the whole vocabulary


class Found(NamedTuple):
    """The best of each block, [batch, places, blocks, count], best first."""

    scores: Tensor  # float64, -inf where there is none
    logits: Tensor  # float64
    tokens: Tensor  # int64, -1
    count: int


@triton.jit
def _place(searched, statistics, target, draft):
    """The request, part and step of a program's row, and whether it has a token. A draft's step: where it was drawn."""
    index = tl.program_id(0).to(tl.int64)
    request = index // searched.rows
    row = index % searched.rows
    part = row // target.steps
    step = row % target.steps
    if searched.OF_DRAFTS:
        part = step * 0 + statistics.PARTS
        step = row
    place = (request * target.steps + step) * (statistics.PARTS + 1) + part
    there = (tl.load(searched.masses + place) >= 0) & target_is_valid(target, request)
    if searched.OF_DRAFTS:
        step = drafted_at(draft, request, step)
        there &= step >= 0
        step = tl.maximum(step, 0)
    return request, part, step, there


@triton.jit
def _values(searched, statistics, target, draft, request, part, step, tokens):
    """Clean logits, float32 like tokens, -inf where there is none."""
    used = tokens >= 0
    if searched.OF_DRAFTS:
        values = draft_values(target, draft, request, step, tokens, used)
    else:
        values = tl.zeros(tokens.shape, tl.float32) - INFINITY
        for index in tl.static_range(statistics.PARTS):
            if part == index:
                values = part_logits(target, index, request, step, tokens, used, -INFINITY)
    return values


@triton.jit
def _reaches(searched, statistics, target, draft, request, part, step, block, least):
    """Whether a block has a logit that is not below the least."""
    plane = part
    if searched.OF_DRAFTS:
        plane = part * 0 + statistics.DRAFT_PLANE
        if statistics.DRAFT_PLANE <= 0:
            drafter = drafter_of(draft, request, step, step >= 0)
            plane = tl.minimum(tl.maximum(drafter, 0), statistics.PARTS - 1).to(tl.int64)
    return block_maximum(statistics, request * target.steps + step, plane, block) >= least


@triton.jit
def _half_key(values, HALF: tl.constexpr):
    """The bits of 16-bit numbers in their order, int32; the largest float32 counts as infinite."""
    values = tl.where(values == 0, 0.0, values)
    if HALF:
        bounded = tl.minimum(tl.maximum(values, -HALF_MAX), HALF_MAX)
        word = bounded.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        word = tl.where(values > HALF_MAX, 0x7C00, tl.where(values < -HALF_MAX, 0xFC00, word))
    else:
        word = ((values.to(tl.int32, bitcast=True).to(tl.int64) + 0x8000) >> 16).to(tl.int32) & 0xFFFF
    return tl.where(word >= 0x8000, 0xFFFF - word, word + 0x8000)


@triton.jit
def _buckets_kernel(
    sums_ptr,  # float64 [batch, rows, blocks, BUCKETS], written
    searched,  # Searched
    weights,  # Weights
    statistics,  # Statistics
    target,  # TargetView
    draft,  # DraftView
    DEPENDENT: tl.constexpr,
):
    wait_for_launch_before(DEPENDENT)
    index = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    request, part, step, there = _place(searched, statistics, target, draft)
    bucket = tl.arange(0, BUCKETS)
    sums = tl.zeros([BUCKETS], tl.float64)
    least = tl.load(weights.least + index)
    there &= _reaches(searched, statistics, target, draft, request, part, step, block, least)
    if there:
        temperature = target_temperature(target, request)
        if searched.OF_DRAFTS:
            temperature = draft_temperature(draft, request)
        scale = logit_scale(temperature)
        largest = tl.load(weights.largest + index).to(tl.float32)
        prefix = tl.load(weights.prefix + index).to(tl.int32)
        AT: tl.constexpr = AT_ONCE if statistics.BLOCK_VOCAB > AT_ONCE else statistics.BLOCK_VOCAB
        for start in range(0, statistics.BLOCK_VOCAB, AT):
            tokens = block * statistics.BLOCK_VOCAB + start + tl.arange(0, AT)
            values = _values(searched, statistics, target, draft, request, part, step, tokens)
            key = _half_key(values, weights.HALF)
            inside = (values >= least) & (values > -INFINITY) & ((key >> (weights.shift + DIGIT)) == prefix)
            power = tl.zeros(tokens.shape, tl.float32) + 1.0
            if not weights.COUNTS:
                power = tl.exp2((values - largest) * scale)
            power = tl.where(inside, power, 0.0)
            digit = (key >> weights.shift) & (BUCKETS - 1)
            own = tl.where(digit[:, None] == bucket[None, :], power[:, None], 0.0)
            sums += tl.sum(own, 0).to(tl.float64)
    tl.store(sums_ptr + (index * statistics.blocks + block) * BUCKETS + bucket, sums)


@triton.jit
def _largest_kernel(
    values_ptr,  # float32 [batch, rows, blocks, count], written: the largest of each block in any order, then -inf
    lasts_ptr,  # float32 [batch, rows, blocks], written: the least of them
    rests_ptr,  # float64 [batch, rows, blocks], written: how often more it comes
    searched,  # Searched
    count,  # at most BLOCK_VOCAB
    statistics,  # Statistics
    target,  # TargetView
    draft,  # DraftView
    DEPENDENT: tl.constexpr,
):
    wait_for_launch_before(DEPENDENT)
    index = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    request, part, step, there = _place(searched, statistics, target, draft)
    place = index * statistics.blocks + block
    slot = tl.arange(0, statistics.BLOCK_VOCAB)
    if not there:
        tl.store(values_ptr + place * count + slot, tl.zeros_like(slot).to(tl.float32) - INFINITY, mask=slot < count)
        tl.store(lasts_ptr + place, -INFINITY)
        tl.store(rests_ptr + place, 0.0)
        return
    tokens = tokens_of(statistics, block)
    values = _values(searched, statistics, target, draft, request, part, step, tokens)
    values = tl.where(values == 0, 0.0, values)
    low = key_of(tl.full([], -FLOAT_MAX, tl.float32))
    high = key_of(tl.full([], FLOAT_MAX, tl.float32)) + 1
    for _ in range(HALVINGS):  # so many reach the value of low, or all do, and fewer that of high
        middle = (low + high) >> 1
        enough = tl.sum((values >= value_of(middle)).to(tl.int32), 0) >= count
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    last = value_of(low)
    above = values > last
    equal = values == last
    num_above = tl.sum(above.to(tl.int32), 0)
    at = tl.where(above, tl.cumsum(above.to(tl.int32), 0) - 1, num_above + tl.cumsum(equal.to(tl.int32), 0) - 1)
    stored = (above | equal) & (at < count)
    num_stored = tl.sum(stored.to(tl.int32), 0)
    tl.store(values_ptr + place * count + at, values, mask=stored)
    none = tl.zeros_like(slot).to(tl.float32) - INFINITY
    tl.store(values_ptr + place * count + slot, none, mask=(slot >= num_stored) & (slot < count))
    tl.store(lasts_ptr + place, last)
    tl.store(rests_ptr + place, (num_above + tl.sum(equal.to(tl.int32), 0) - num_stored).to(tl.float64))


@triton.jit
def _searched_logits_kernel(
    logits_ptr,  # float32 [batch, rows, width], written: -inf where there is none, or it is below the least
    least_ptr,  # float32 [batch, rows]
    width,
    searched,  # Searched
    statistics,  # Statistics
    target,  # TargetView
    draft,  # DraftView
    DEPENDENT: tl.constexpr,
):
    wait_for_launch_before(DEPENDENT)
    index = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    request, part, step, there = _place(searched, statistics, target, draft)
    least = tl.load(least_ptr + index)
    there &= _reaches(searched, statistics, target, draft, request, part, step, block, least)
    tokens = tokens_of(statistics, block)
    values = tl.zeros(tokens.shape, tl.float32) - INFINITY
    if there:
        values = _values(searched, statistics, target, draft, request, part, step, tokens)
        values = tl.where(values >= least, values, -INFINITY)
    tl.store(logits_ptr + index * width + tokens, values, mask=tokens < width)


@triton.jit
def _best_kept_kernel(
    found,  # Found, written
    places,  # ShardPlaces, with the logits that are kept
    noise,  # Noise
    statistics,  # Statistics
    target,  # TargetView, one part
    DEPENDENT: tl.constexpr,
):
    wait_for_launch_before(DEPENDENT)
    place = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    request, step, usable = row_at(places, target, place)
    keeps = usable
    if usable:
        keeps = keeps_of_block(places, statistics, request * target.steps + step, block)
    last = tl.full([], INFINITY, tl.float64)  # the score of the token that was found before
    token = tl.full([], -1, tl.int64)
    at = (place * statistics.blocks + block) * found.count
    for rank in range(found.count):
        best = tl.full([], -INFINITY, tl.float64)
        logit = best
        after = token
        token = tl.full([], -1, tl.int64)
        if keeps:
            least = tl.load(places.least + (request * target.steps + step) * (statistics.PARTS + 1))
            largest = tl.load(noise.largest + place)
            seed = tl.load(noise.seeds + request)
            position = tl.load(noise.positions + place)
            rate = 1.0 / target_temperature(target, request).to(tl.float64)
            AT: tl.constexpr = SCORED_AT_ONCE if statistics.BLOCK_VOCAB > SCORED_AT_ONCE else statistics.BLOCK_VOCAB
            for start in range(0, statistics.BLOCK_VOCAB, AT):
                tokens = block * statistics.BLOCK_VOCAB + start + tl.arange(0, AT)
                values = part_logits(target, 0, request, step, tokens, tokens >= 0, -INFINITY)
                kept = (values >= least) & (values > -INFINITY)
                if tl.max(kept.to(tl.int32), 0) > 0:
                    scaled = (values.to(tl.float64) - largest) * rate
                    own = scaled - tl.log(token_noise(seed, position, tokens + noise.first_token))
                    left = kept & ((own < last) | ((own == last) & (tokens > after)))
                    own = tl.where(left, own, -INFINITY)
                    score = tl.max(own, 0)
                    chosen = tl.min(tl.where(own == score, tokens, NOWHERE), 0)
                    better = score > best
                    value = tl.max(tl.where(tokens == chosen, values, -INFINITY), 0).to(tl.float64)
                    best = tl.where(better, score, best)
                    logit = tl.where(better, value, logit)
                    token = tl.where(better, chosen.to(tl.int64), token)
        tl.store(found.scores + at + rank, best)
        tl.store(found.logits + at + rank, logit)
        tl.store(found.tokens + at + rank, token)
        last = best
        keeps = keeps & (best > -INFINITY)


def best_kept(
    member_logits: list[Tensor],
    draft_tokens: Tensor,
    row_of: Tensor,
    shares: Tensor,
    masses: Tensor,
    state: Tensor,
    seeds: Tensor,
    positions: Tensor,
    first_token: int,
    count: int,
    *,
    least: Tensor,
    **options: Any,
) -> list[Tensor]:
    """`best_kept_of_shard`, of a lone model or a mixture of logits that is filtered."""
    own = views(member_logits, draft_tokens, options, state)
    planes = own.statistics.numbers.view(*masses.shape[:2], *own.statistics.numbers.shape[1:])
    largest = planes[:, :, 0].amax(-1).double().gather(1, row_of).clamp(min=-torch.finfo(torch.float32).max)
    shape = (*row_of.shape, own.statistics.blocks, count)
    found = Found(masses.new_empty(shape), masses.new_empty(shape), row_of.new_empty(shape), count)
    places = places_of(row_of, shares, masses, least)
    run(best_launches(found, places, Noise(seeds, positions, largest, first_token), own), found.scores)
    scores, logits, tokens = (part.flatten(2) for part in found[:3])  # in the order of tokens, but for those of a block
    best = scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    return [logits.gather(-1, best), tokens.gather(-1, best)]


def best_launches(found: Found, places: ShardPlaces, noise: Noise, own: Views) -> Iterator[Launch]:
    yield from edit_launches(own)
    arguments = {"found": found, "places": places, "noise": noise, **own._asdict()}
    del arguments["draft"]
    shape = found.scores.shape
    yield Launch(_best_kept_kernel, (shape[0] * shape[1], shape[2]), arguments, BLOCK_WARPS)


def searched_of(own: Views, masses: Tensor, of_drafts: bool) -> Searched:
    rows = own.draft.draft_len if of_drafts else own.target.steps * own.statistics.PARTS.value
    return Searched(masses, rows, tl.constexpr(of_drafts))


def buckets(
    member_logits: list[Tensor],
    draft_tokens: Tensor,
    masses: Tensor,
    state: Tensor,
    of_drafts: bool,
    largest: Tensor,
    least: Tensor,
    prefix: Tensor,
    shift: int,
    half: bool,
    counts: bool,
    **options: Any,
) -> Tensor:
    """`buckets_of_shard`."""
    own = views(member_logits, draft_tokens, options, state)
    weights = Weights(largest, least, prefix, shift, tl.constexpr(half), tl.constexpr(counts))
    sums = largest.new_empty(*largest.shape, own.statistics.blocks, BUCKETS.value)
    run(bucket_launches(sums, searched_of(own, masses, of_drafts), weights, own), sums)
    return sums.sum(2)


def bucket_launches(sums: Tensor, searched: Searched, weights: Weights, own: Views) -> Iterator[Launch]:
    yield from edit_launches(own)
    grid = batch_of(own.target) * searched.rows, own.statistics.blocks
    arguments = {"sums_ptr": sums, "searched": searched, "weights": weights, **own._asdict()}
    yield Launch(_buckets_kernel, grid, arguments, BLOCK_WARPS)


def searched_tokens(
    member_logits: list[Tensor],
    draft_tokens: Tensor,
    masses: Tensor,
    state: Tensor,
    of_drafts: bool,
    largest: Tensor,
    least: Tensor,
    counts: bool,
    options: dict[str, Any],
) -> WrittenTokens:
    """WrittenTokens of keys of 32 bits, as `samples_of_shard` and `entries_of_shard` look at them."""
    own = views(member_logits, draft_tokens, options, state)
    width = max(own.target.vocab, own.draft.vocab)
    logits = torch.empty(*largest.shape, width, dtype=torch.float32, device=largest.device)
    run(searched_launches(logits, least, searched_of(own, masses, of_drafts), own), logits)
    keys = OF_FLOAT32.of(logits)
    if counts:
        return WrittenTokens(keys, (logits > -math.inf).double(), None, None)
    given = target_of(member_logits, options)
    sampling = draft_of(draft_tokens, given, options).sampling if of_drafts else given.sampling
    temperature = parameters(sampling, draft_tokens).temperature
    scaled = (logits.double() - largest[..., None]) / temperature[:, None, None]
    return WrittenTokens(keys, torch.where(logits > -math.inf, scaled.exp(), 0.0), temperature, largest)


def searched_launches(logits: Tensor, least: Tensor, searched: Searched, own: Views) -> Iterator[Launch]:
    yield from edit_launches(own)
    grid = logits.shape[0] * logits.shape[1], own.statistics.blocks
    arguments = {"logits_ptr": logits, "least_ptr": least, "width": logits.shape[2]}
    yield Launch(_searched_logits_kernel, grid, {**arguments, "searched": searched, **own._asdict()}, BLOCK_WARPS)


def samples(*given: Any, **options: Any) -> list[Tensor]:
    """`samples_of_shard`."""
    *searched, octaves, count = given
    return searched_tokens(*searched, options).samples(octaves, count)


def entries(*given: Any, **options: Any) -> list[Tensor]:
    """`entries_of_shard`."""
    *searched, octave, low, high, count = given
    found = searched_tokens(*searched, options).entries(Bracket(octave, low, high, octave, octave), count)
    return [part.contiguous() for part in found]


def largest(
    member_logits: list[Tensor],
    draft_tokens: Tensor,
    masses: Tensor,
    state: Tensor,
    of_drafts: bool,
    count: int,
    **options: Any,
) -> list[Tensor]:
    """`largest_of_shard`."""
    own = views(member_logits, draft_tokens, options, state)
    searched = searched_of(own, masses, of_drafts)
    blocks, kept = own.statistics.blocks, min(count, own.statistics.BLOCK_VOCAB.value)
    shape = (batch_of(own.target), searched.rows, blocks)
    values = masses.new_empty(*shape, kept, dtype=torch.float32)
    lasts, rests = masses.new_empty(shape, dtype=torch.float32), masses.new_empty(shape)
    run(largest_launches(values, lasts, rests, searched, own), values)
    return list(_of_row(values.flatten(2), lasts, rests, count))


def _of_row(values: Tensor, lasts: Tensor, rests: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Of what blocks have found: the largest of all, descending, and how often more the last one comes."""
    found = min(count, values.shape[-1])
    best = values.topk(found, -1).values
    last = best[..., -1:]
    ties = (values == last).sum(-1, keepdim=True) - (best == last).sum(-1, keepdim=True)
    ties = ties + torch.where(lasts == last, rests, 0.0).sum(-1, keepdim=True)
    best = torch.nn.functional.pad(best.double(), (0, count - found), value=-math.inf)
    return best, torch.where(last > -math.inf, ties, 0.0)


def largest_launches(values: Tensor, lasts: Tensor, rests: Tensor, searched: Searched, own: Views) -> Iterator[Launch]:
    yield from edit_launches(own)
    found = {"values_ptr": values, "lasts_ptr": lasts, "rests_ptr": rests}
    arguments = {**found, "searched": searched, "count": values.shape[-1], **own._asdict()}
    yield Launch(_largest_kernel, (lasts.shape[0] * lasts.shape[1], lasts.shape[2]), arguments, BLOCK_WARPS)
