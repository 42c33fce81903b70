"""Chains on a GPU of whose rows this is a slice of the vocabulary: what is summed, and compared, elsewhere.

As many launches as of whole rows: the pass over the logits and what is told of them, the block masses of residuals of
the rows that are asked for, and a draw. What makes probabilities are the slice's own sums and its part of each mass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specens_kernels.ops.target_logprobs.triton_kernel import BLOCK_REGISTERS, statistics_launches
from specens_kernels.ops.verify_chain.triton_kernel import DRAW_WARPS
from specens_kernels.ops.verify_chain.triton_shard_rows import (
    ShardPlaces,
    Views,
    block_launches,
    drafted_at,
    edit_launches,
    is_drawn,
    keeps_of_block,
    part_softmax,
    places_of,
    residual_of,
    row_at,
    row_states,
    views,
)
from specens_kernels.ops.verify_chain.triton_shard_tree import draw_left_launches, left_launches
from specens_kernels.parts.chain import drafted_logits, load_draft_tokens
from specens_kernels.parts.draft import draft_temperature, drafter_of, row_is_read
from specens_kernels.parts.draw import choose_block, first_exceeding, target_block_masses
from specens_kernels.parts.launches import Launch, run, wait_for_launch_before
from specens_kernels.parts.sampling import INFINITY
from specens_kernels.parts.statistics import NOWHERE, row_marks, tokens_of, top_tokens
from specens_kernels.parts.target import (
    batch_of,
    everywhere,
    member_weight,
    part_logits,
    target_is_valid,
    target_temperature,
)

TOLD_WARPS = 4  # of the widest vocabularies a number of a plane a thread
RESIDUAL_REGISTERS = 80  # of a thread: three programs at once; where no number is told, some releases spill two


class ShardNumbers(NamedTuple):
    """What is told of each row, as `chain_of_shard` of C++ has it; a row's last part is the draft's."""

    largest: Tensor  # float64 [batch, steps, parts]
    sums: Tensor  # likewise
    tokens: Tensor  # int64 [batch, steps]
    status: Tensor  # int32 [batch, steps, 2]
    looked: Tensor  # float64 [batch, draft_len, parts]; of trees all nodes' logits in what a draft was drawn from


@triton.jit
def _store_looked(found, statistics, target, draft, request, index, step, drafted, used):
    """A draft's logits in the target's parts, and in what it was drawn from; in a tree its siblings' there."""
    PARTS: tl.constexpr = statistics.PARTS
    steps = tl.zeros([1], tl.int64) + index
    token = load_draft_tokens(draft, request, steps, drafted)
    width = PARTS + 1
    if draft.parents is not None:
        width = PARTS + draft.draft_len
    looked_ptr = found.looked + (request * draft.draft_len + steps) * width
    for part in tl.static_range(PARTS):
        here = drafted & (token >= 0) & (token < target.vocab)
        if target.MIXTURE:
            here &= everywhere(member_weight(target, request, part) > 0, steps)
        logit = part_logits(target, part, request, step, token, here, -INFINITY)
        tl.store(looked_ptr + part, tl.where(here, logit, -INFINITY), mask=steps < draft.draft_len)
    drafter = drafter_of(draft, request, steps, used)
    if draft.parents is None:
        logit = tl.zeros([1], tl.float32) - INFINITY
        if statistics.DRAFT_PLANE >= 0:
            logit = drafted_logits(target, draft, drafter, request, step, token, used & (token >= 0))
        tl.store(looked_ptr + PARTS, tl.where(used, logit, -INFINITY), mask=steps < draft.draft_len)
    else:
        for node in range(draft.draft_len):
            other = tl.zeros([1], tl.int64) + node
            beside = used & everywhere(drafted_at(draft, request, node) == step, steps)
            token = load_draft_tokens(draft, request, other, beside)
            logit = tl.zeros([1], tl.float32) - INFINITY
            if statistics.DRAFT_PLANE >= 0:
                logit = drafted_logits(target, draft, drafter, request, step, token, beside & (token >= 0))
            tl.store(looked_ptr + PARTS + node, tl.where(beside, logit, -INFINITY), mask=steps < draft.draft_len)


@triton.jit
def _told_kernel(
    found,  # ShardNumbers, written
    statistics,  # Statistics
    target,  # TargetView
    draft,  # DraftView
    DEPENDENT: tl.constexpr,
):
    wait_for_launch_before(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    request = row // target.steps
    index = row % target.steps
    rows = tl.zeros([1], tl.int64) + row
    valid = everywhere(target_is_valid(target, request), rows)
    read = valid
    step = drafted_at(draft, request, index)
    drafted = valid & everywhere((index < draft.draft_len) & (step >= 0), rows)
    if draft.parents is not None:
        read &= everywhere(row_is_read(target, draft, request, index), rows)
    step = tl.maximum(step, 0)
    drawn_rows = tl.zeros([1], tl.int64) + request * target.steps + step
    PARTS: tl.constexpr = statistics.PARTS + 1
    for part in tl.static_range(statistics.PARTS):
        used = read
        if target.MIXTURE:
            used &= everywhere(member_weight(target, request, part) > 0, rows)
        maximum, powers = part_softmax(statistics, target, draft, request, rows, part, used)
        there = used & (powers > 0)
        tl.store(found.largest + rows * PARTS + part, tl.where(there, maximum, -INFINITY).to(tl.float64))
        tl.store(found.sums + rows * PARTS + part, tl.where(there, powers, 0.0))
    used = drafted & (rows < 0)
    maximum = tl.zeros([1], tl.float32) - INFINITY
    powers = tl.zeros([1], tl.float64)
    if statistics.DRAFT_PLANE >= 0:
        one_hot = (target_temperature(target, request) == 0) | (draft_temperature(draft, request) == 0)
        used = drafted & everywhere(one_hot == 0, rows)
        maximum, powers = part_softmax(statistics, target, draft, request, drawn_rows, statistics.PARTS, used)
    there = used & (powers > 0)
    tl.store(found.largest + rows * PARTS + statistics.PARTS, tl.where(there, maximum, -INFINITY).to(tl.float64))
    tl.store(found.sums + rows * PARTS + statistics.PARTS, tl.where(there, powers, 0.0))
    _store_looked(found, statistics, target, draft, request, index, step, drafted, used)
    marks, draft_marks = row_marks(statistics, rows, read)
    if draft.parents is not None:
        _, draft_marks = row_marks(statistics, drawn_rows, drafted)
    tl.store(found.status + rows * 2, marks)
    tl.store(found.status + rows * 2 + 1, draft_marks)
    likely = tl.zeros([1], tl.int32)
    if statistics.TOP_PLANE >= 0:
        likely = top_tokens(statistics, rows, read)
    tl.store(found.tokens + rows, tl.where(likely < NOWHERE, likely, 0).to(tl.int64))


@triton.jit
def _shard_residual_kernel(
    blocks_ptr,  # float64 [batch, count, blocks], written
    subtracts_ptr,  # int8 [batch], where only rows are written of which nothing is subtracted; None: all, subtracted
    places,  # ShardPlaces
    statistics,  # Statistics
    target,  # TargetView
    draft,  # DraftView
    DEPENDENT: tl.constexpr,
):
    wait_for_launch_before(DEPENDENT)
    place = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    request = place // places.count
    step = tl.load(places.rows + place)
    blocks_ptr += place * statistics.blocks + block
    usable = target_is_valid(target, request) & (target_temperature(target, request) != 0)
    subtracts = step >= 0
    written = subtracts
    if subtracts_ptr is None:
        usable &= step < draft.draft_len
    else:
        written = tl.load(subtracts_ptr + request) == 0
        usable &= step < target.steps
        subtracts = step < 0
    if not written:
        return
    if not usable:
        tl.store(blocks_ptr, 0.0)
        return
    keeps = usable
    if places.least is not None:
        keeps = keeps_of_block(places, statistics, request * target.steps + step, block)
    if not keeps:
        tl.store(blocks_ptr, 0.0)
        return
    steps = tl.zeros([1], tl.int64) + step
    drawn = subtracts & is_drawn(places, statistics, request, target.steps, step)
    states = row_states(places, statistics, target, draft, request, steps, steps, drawn)
    tokens = tokens_of(statistics, block)
    masses = residual_of(places, statistics, target, draft, states, request, place, step, tokens, drawn, subtracts)
    tl.store(blocks_ptr, tl.sum(masses, 0).to(tl.float64))


@triton.jit
def _shard_draw_kernel(
    tokens_ptr,  # int64 [batch], written: -1 where no token has mass
    blocks_ptr,  # float64 [batch, blocks], the residual's; of filtered rows the target's where nothing is subtracted
    subtracts_ptr,  # int8 [batch]
    goals_ptr,  # float64 [batch]
    places,  # ShardPlaces, one of each request
    statistics,  # Statistics
    target,  # TargetView
    draft,  # DraftView
    DEPENDENT: tl.constexpr,
):
    wait_for_launch_before(DEPENDENT)
    request, step, usable = row_at(places, target, tl.program_id(0).to(tl.int64))
    subtracts = tl.load(subtracts_ptr + request) != 0
    if not usable:
        tl.store(tokens_ptr + request, -1)
        return
    steps = tl.zeros([1], tl.int64) + step
    drawn = subtracts & is_drawn(places, statistics, request, target.steps, step)
    states = row_states(places, statistics, target, draft, request, steps, steps, drawn)
    block = tl.arange(0, statistics.BLOCK_COUNT)
    summed = everywhere(subtracts, block)
    if places.least is not None:
        summed |= block >= 0
    masses_ptr = blocks_ptr + request * statistics.blocks + block
    masses = tl.load(masses_ptr, mask=summed & (block < statistics.blocks), other=0.0)
    if places.least is None:
        of_target = target_block_masses(statistics, states.target, request * target.steps + steps)
        masses = tl.where(subtracts, masses, of_target)
    chosen, goal = choose_block(masses, tl.load(goals_ptr + request))
    tokens = tokens_of(statistics, chosen)
    left = residual_of(places, statistics, target, draft, states, request, request, step, tokens, drawn, subtracts)
    tl.store(tokens_ptr + request, first_exceeding(left.to(tl.float64), goal, tokens).to(tl.int64))


def new_numbers(own: Views) -> ShardNumbers:
    """Unwritten."""
    batch, steps, parts = batch_of(own.target), own.target.steps, own.statistics.PARTS.value + 1
    like, in_draft = own.statistics.numbers, 1 if own.draft.parents is None else own.draft.draft_len
    return ShardNumbers(
        like.new_empty(batch, steps, parts, dtype=torch.float64),
        like.new_empty(batch, steps, parts, dtype=torch.float64),
        like.new_empty(batch, steps, dtype=torch.int64),
        like.new_empty(batch, steps, 2, dtype=torch.int32),
        like.new_empty(batch, own.draft.draft_len, parts - 1 + in_draft, dtype=torch.float64),
    )


def read(member_logits: list[Tensor], draft_tokens: Tensor, **options: Any) -> list[Tensor]:
    """`chain_of_shard`."""
    own = views(member_logits, draft_tokens, options, None)
    found = new_numbers(own)
    run(read_launches(found, own), found.largest)
    return [*found, own.statistics.numbers]


def read_launches(found: ShardNumbers, own: Views) -> Iterator[Launch]:
    yield from statistics_launches(own.statistics, own.target, own.draft)
    yield Launch(_told_kernel, (found.tokens.numel(),), {"found": found, **own._asdict()}, TOLD_WARPS)


def residual(
    member_logits: list[Tensor],
    draft_tokens: Tensor,
    row_of: Tensor,
    shares: Tensor,
    masses: Tensor,
    state: Tensor,
    *,
    least: Tensor | None = None,
    offers: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """`residual_of_shard`."""
    own = views(member_logits, draft_tokens, options, state)
    blocks = masses.new_empty(*row_of.shape, own.statistics.blocks)
    places = places_of(row_of, shares, masses, least, offers)
    run(residual_launches(blocks, None, places, own) if offers is None else left_launches(blocks, places, own), blocks)
    return blocks


def residual_launches(blocks: Tensor, subtracts: Tensor | None, places: ShardPlaces, own: Views) -> Iterator[Launch]:
    return block_launches(_shard_residual_kernel, blocks, places, own, RESIDUAL_REGISTERS, subtracts_ptr=subtracts)


def draw(
    member_logits: list[Tensor],
    draft_tokens: Tensor,
    row_of: Tensor,
    shares: Tensor,
    masses: Tensor,
    state: Tensor,
    block_masses: Tensor,
    subtracts: Tensor,
    goals: Tensor,
    *,
    least: Tensor | None = None,
    offers: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """`draw_of_shard`."""
    own = views(member_logits, draft_tokens, options, state)
    tokens, places = row_of.new_empty(len(row_of)), places_of(row_of, shares, masses, least, offers)
    if offers is not None:
        run(draw_left_launches(tokens, block_masses, goals, places, own), tokens)
        return tokens
    which = subtracts.view(torch.int8)
    if least is not None:
        block_masses = block_masses.clone()
        run(residual_launches(block_masses[:, None], which, places, own), tokens)
    drawn = {"blocks_ptr": block_masses, "subtracts_ptr": which, "goals_ptr": goals}
    run(draw_launches(tokens, drawn, places, own), tokens)
    return tokens


def draw_launches(tokens: Tensor, drawn: dict[str, Tensor], places: ShardPlaces, own: Views) -> Iterator[Launch]:
    yield from edit_launches(own)
    arguments = {"tokens_ptr": tokens, **drawn, "places": places, **own._asdict()}
    yield Launch(_shard_draw_kernel, (len(tokens),), arguments, DRAW_WARPS, BLOCK_REGISTERS)
