"""The slices of rows that kernels of chains, trees, filters and reports look at."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from specens_kernels.arguments import draft_of, ready_for_kernels, target_of
from specens_kernels.ops.target_logprobs.triton_edits import edit_launch
from specens_kernels.ops.target_logprobs.triton_kernel import BLOCK_WARPS
from specens_kernels.parts.chain import load_draft_tokens
from specens_kernels.parts.draft import (
    DraftView,
    draft_temperature,
    draft_view,
    drafter_logits,
    drafter_of,
    raw_draft_logits,
)
from specens_kernels.parts.draw import RowStates, block_probabilities
from specens_kernels.parts.launches import Launch, run
from specens_kernels.parts.sampling import FLOAT_MAX, INFINITY, logit_scale
from specens_kernels.parts.states import DraftState, TargetState, part_probability
from specens_kernels.parts.statistics import Statistics, new_statistics, row_softmax
from specens_kernels.parts.target import (
    TargetView,
    clean,
    everywhere,
    member_weight,
    part_logits,
    raw_logits,
    target_is_valid,
    target_temperature,
    target_view,
)
from specens_kernels.values import fail


class ShardPlaces(NamedTuple):
    """A row of each of `count` places of each request."""

    rows: Tensor  # int64 [batch, count]
    shares: Tensor  # float64 [batch, count]
    masses: Tensor  # float64 [batch, steps, parts], the slice's part of the row's; negative: no token, a one-hot draft
    count: int
    least: Tensor | None  # float32 [batch, steps, parts], of the logits that are kept; None: all
    offers: Tensor | None = None  # float64 [batch, draft_len, 2] of trees, as `ShardPlaces` of C++ has them


class Views(NamedTuple):
    """The arguments of a call as kernels take them."""

    statistics: Statistics
    target: TargetView
    draft: DraftView


@triton.jit
def drafted_at(draft, request, index):
    """The row of a request's draft, a scalar: where it was drawn; less than 0 for padding of trees."""
    if draft.parents is None:
        return index
    else:
        there = index < draft.draft_len
        return tl.load(draft.parents + request * draft.draft_len + index, mask=there, other=-2) + 1


@triton.jit
def part_softmax(statistics, target, draft, request, rows, part: tl.constexpr, used):
    """The largest logit and the sum of powers of a part of rows of a request; 0 where it has no token here."""
    if part < statistics.PARTS:
        scale = logit_scale(target_temperature(target, request))
        return row_softmax(statistics, rows, part, statistics.PARTS + part, scale, used)
    else:
        scale = logit_scale(draft_temperature(draft, request))
        plane = statistics.DRAFT_PLANE
        if statistics.DRAFT_PLANE == 0:
            plane = drafter_of(draft, request, rows - request * target.steps, used)
            used &= (plane >= 0) & (plane < statistics.PARTS)
            return row_softmax(statistics, rows, plane, statistics.PARTS + plane, scale, used)
        else:
            return row_softmax(statistics, rows, plane, plane + 1, scale, used)


@triton.jit
def mass_at(places, statistics, rows, part):
    return tl.load(places.masses + rows * (statistics.PARTS + 1) + part)


@triton.jit
def _offset(mass, powers, there):
    """The logarithm of what powers are multiplied with."""
    log = tl.log2(tl.where(there, mass, 1.0)) - tl.log2(tl.where(there, powers, 1.0))
    return tl.where(there, log, -INFINITY)


@triton.jit
def row_states(places, statistics, target, draft, request, steps, index, drawn):
    """The RowStates of the slice of a row; the draft's is zero unless it is drawn. index: of the draft, [1]."""
    rows = request * target.steps + steps
    all_rows = rows >= 0
    total = tl.zeros([1], tl.float64)
    for part in tl.static_range(statistics.PARTS):
        if target.MIXTURE:
            alive = mass_at(places, statistics, rows, part) >= 0
            total += tl.where(alive, member_weight(target, request, part).to(tl.float64), 0.0)
        else:
            total += 1.0
    maxima = ()
    offsets = ()
    for part in tl.static_range(statistics.PARTS):
        maximum, powers = part_softmax(statistics, target, draft, request, rows, part, all_rows)
        mass = mass_at(places, statistics, rows, part)
        if target.MIXTURE:
            mass *= member_weight(target, request, part).to(tl.float64)
        there = (mass > 0) & (powers > 0)
        maxima += (tl.where(there, maximum, FLOAT_MAX),)
        offsets += (_offset(mass / tl.where(total > 0, total, 1.0), powers, there),)
    scale = logit_scale(target_temperature(target, request))
    own = DraftState(tl.zeros([1], tl.float32), tl.zeros([1], tl.float64), 1.0, tl.zeros([1], tl.float32) - INFINITY)
    drafter = -1
    if statistics.DRAFT_PLANE >= 0:
        used = everywhere(drawn, steps)
        maximum, powers = part_softmax(statistics, target, draft, request, rows, statistics.PARTS, used)
        mass = mass_at(places, statistics, request * target.steps + index, statistics.PARTS)
        there = used & (mass > 0) & (powers > 0)
        maximum = tl.where(there, maximum, FLOAT_MAX)
        own = DraftState(maximum, _offset(mass, powers, there), logit_scale(draft_temperature(draft, request)), own.cut)
        drafter = tl.max(drafter_of(draft, request, steps, used), 0)
    threshold = tl.zeros([1], tl.float32) - INFINITY
    return RowStates(TargetState(maxima, offsets, scale, threshold, ()), own, drafter)


@triton.jit
def draft_values(target, draft, request, step, tokens, used):
    """Clean logits that the draft of a row was drawn from, float32; -inf where nothing drafted, or `used` is false."""
    logits = tl.zeros(tokens.shape, tl.float32) - INFINITY
    if draft.logits is not None:
        logits = raw_draft_logits(target, draft, request, step, tokens, used)
    else:
        drafter = drafter_of(draft, request, step, step >= 0)
        for member in tl.static_range(len(target.logits)):
            if drafter == member:
                logits = raw_logits(target, member, request, step, tokens, used)
                logits = drafter_logits(target, draft, member, request, step, tokens, used, logits)
    return clean(logits)


@triton.jit
def block_maximum(statistics, row, plane, block):
    """The largest logit of a block of a part, float32."""
    return tl.load(statistics.numbers + (row * statistics.PLANES + plane) * statistics.blocks + block)


@triton.jit
def keeps_of_block(places, statistics, row, block):
    """Whether any token of the target may be kept in a block."""
    least_ptr = places.least + row * (statistics.PARTS + 1)
    keeps = row < 0
    for part in tl.static_range(statistics.PARTS):
        keeps |= block_maximum(statistics, row, part, block) >= tl.load(least_ptr + part)
    return keeps


@triton.jit
def drafted_probabilities(places, statistics, target, draft, own, request, step, index, tokens):
    """Those of what is kept of a draft's distribution, of this index and drawn at this step; own: its state."""
    logits = draft_values(target, draft, request, step, tokens, tokens >= 0)
    powers = tl.exp2(tl.fma(logits - own.maximum, own.scale, own.offset.to(tl.float32)))
    if places.least is None:
        return powers
    else:
        least_ptr = places.least + (request * target.steps + index) * (statistics.PARTS + 1)
        return tl.where(logits >= tl.load(least_ptr + statistics.PARTS), powers, 0.0)


@triton.jit
def kept_probabilities(places, statistics, target, draft, states, request, step, index, tokens, drawn):
    """`block_probabilities` of what is kept."""
    least_ptr = places.least + (request * target.steps + step) * (statistics.PARTS + 1)
    probabilities = tl.zeros(tokens.shape, tl.float32)
    for part in tl.static_range(statistics.PARTS):
        logits = part_logits(target, part, request, step, tokens, tokens >= 0, -INFINITY)
        kept = logits >= tl.load(least_ptr + part)
        probabilities += tl.where(kept, part_probability(states.target, part, logits), 0.0)
    draft_probabilities = tl.zeros(tokens.shape, tl.float32)
    if statistics.DRAFT_PLANE >= 0:  # noqa: SIM102 - decided when compiling
        if drawn:
            draft_probabilities = drafted_probabilities(
                places, statistics, target, draft, states.draft, request, step, index, tokens
            )
    return probabilities, draft_probabilities


@triton.jit
def residual_of(places, statistics, target, draft, states, request, place, step, tokens, drawn, subtracts):
    """max(share * target - draft, 0) of each token, or the target where nothing is subtracted; float32."""
    if places.least is None:
        target_masses, draft_masses = block_probabilities(
            statistics, target, draft, states, request, step, tokens, drawn
        )
    else:
        target_masses, draft_masses = kept_probabilities(
            places, statistics, target, draft, states, request, step, step, tokens, drawn
        )
    share = tl.load(places.shares + place).to(tl.float32)
    steps = tl.zeros([1], tl.int64) + step
    token = tl.max(load_draft_tokens(draft, request, steps, everywhere(subtracts & (drawn == 0), steps)), 0)
    one_hot = tl.where((tokens == token) & (token >= 0), 1.0, 0.0)
    share = tl.where(subtracts, share, 1.0)
    return tl.maximum(target_masses * share - tl.where(drawn, draft_masses, one_hot), 0.0)


@triton.jit
def is_drawn(places, statistics, request, steps, step):
    return mass_at(places, statistics, request * steps + step, statistics.PARTS) >= 0


@triton.jit
def row_at(places, target, place):
    """The request and step of a place, and whether the target has a distribution there."""
    request = place // places.count
    step = tl.load(places.rows + place)
    usable = (step < target.steps) & target_is_valid(target, request) & (target_temperature(target, request) != 0)
    return request, step, usable


def views(member_logits: list[Tensor], draft_tokens: Tensor, options: dict[str, Any], state: Tensor | None) -> Views:
    """state: the numbers of the statistics, where they are there."""
    given = target_of(member_logits, options)
    ready, steps = ready_for_kernels(given), member_logits[0].shape[1]
    target = target_view(ready, steps, draft_tokens)
    draft = draft_view(target, ready_for_kernels(draft_of(draft_tokens, given, options)))
    return with_statistics(*along_paths(target, draft, options.get("parents")), state)


def along_paths(target: TargetView, draft: DraftView, parents: Tensor | None) -> tuple[TargetView, DraftView]:
    """The same of a tree. Which nodes one member drew where there is no other is told by their masses."""
    if parents is None:
        return target, draft
    if target.edits is not None:
        target = target._replace(edits=target.edits._replace(parents=parents, num_drafts=parents.shape[1]))
    if draft.drafters is not None:
        if len(target.logits) > 1:
            fail("drafter", "one for all nodes, where Triton reads slices of trees", "one a node")
        draft = draft._replace(drafters=None, drafter=0)
    return target, draft._replace(parents=parents)


def with_statistics(target: TargetView, draft: DraftView, state: Tensor | None = None) -> Views:
    lone = not target.MIXTURE.value or len(target.logits) == 1
    statistics = new_statistics(target, draft, all_tops=lone)
    return Views(statistics if state is None else statistics._replace(numbers=state), target, draft)


def places_of(
    rows: Tensor, shares: Tensor, masses: Tensor, least: Tensor | None, offers: Tensor | None = None
) -> ShardPlaces:
    return ShardPlaces(rows, shares, masses, rows.shape[1], least, offers)


def block_launches(
    kernel: Any, blocks: Tensor, places: ShardPlaces, own: Views, registers: int | None = None, **others: Any
) -> Iterator[Launch]:
    """A kernel that tells of each block of the row of each place: blocks [batch, count, blocks] and perhaps more.

    others: its own arguments.
    """
    yield from edit_launches(own)
    grid = blocks.shape[0] * blocks.shape[1], blocks.shape[2]
    arguments = {"blocks_ptr": blocks, **others, "places": places, **own._asdict()}
    yield Launch(kernel, grid, arguments, BLOCK_WARPS, registers)


def sums_at(
    kernel: Any,
    member_logits: list[Tensor],
    draft_tokens: Tensor,
    row_of: Tensor,
    shares: Tensor,
    masses: Tensor,
    state: Tensor,
    *,
    least: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """What a kernel adds up at each place."""
    own = views(member_logits, draft_tokens, options, state)
    blocks = masses.new_empty(*row_of.shape, own.statistics.blocks)
    run(block_launches(kernel, blocks, places_of(row_of, shares, masses, least), own), blocks)
    return blocks.sum(-1)


def edit_launches(own: Views) -> Iterator[Launch]:
    if own.target.edits is not None:
        yield edit_launch(own.target.edits)
