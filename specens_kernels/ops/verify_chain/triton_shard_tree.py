"""Slices of trees on a GPU: what is left of rows while children are rejected, and of what these were drawn from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from specens_kernels.ops.target_logprobs.triton_kernel import BLOCK_REGISTERS
from specens_kernels.ops.verify_chain.triton_kernel import DRAW_WARPS
from specens_kernels.ops.verify_chain.triton_shard_rows import (
    ShardPlaces,
    Views,
    block_launches,
    drafted_at,
    drafted_probabilities,
    edit_launches,
    keeps_of_block,
    kept_probabilities,
    mass_at,
    places_of,
    row_at,
    row_states,
    sums_at,
    views,
)
from specens_kernels.parts.chain import load_draft_tokens
from specens_kernels.parts.draft import NODES_AT_ONCE
from specens_kernels.parts.draw import block_probabilities, choose_block, first_exceeding
from specens_kernels.parts.launches import Launch, run, wait_for_launch_before
from specens_kernels.parts.statistics import NOWHERE, tokens_of
from specens_kernels.parts.target import target_is_valid, target_temperature

EDITED_REGISTERS = 160  # of a thread that weighs ratios; what edits look up takes more than two programs at once leave


@triton.jit
def _drawn_child(places, statistics, target, draft, request, row):
    """The first child of a row that was drawn from a distribution and is gone, a scalar; NOWHERE where none is."""
    found = tl.full([], NOWHERE, tl.int32)
    for first in range(0, draft.draft_len, NODES_AT_ONCE):
        node = first + tl.arange(0, NODES_AT_ONCE)
        there = node < draft.draft_len
        place = request * draft.draft_len + node
        parent = tl.load(draft.parents + place, mask=there, other=-2)
        share = tl.load(places.offers + 2 * place, mask=there, other=-1.0)
        mass_ptr = places.masses + (request * target.steps + node) * (statistics.PARTS + 1) + statistics.PARTS
        mass = tl.load(mass_ptr, mask=there, other=-1.0)
        hit = (parent + 1 == row) & (share >= 0) & (mass >= 0)
        found = tl.minimum(found, tl.min(tl.where(hit, node, NOWHERE), 0))
    return found


@triton.jit
def _left_of_row(places, statistics, target, draft, request, row, tokens):
    """What the children of a row that are gone leave of it, float32 like tokens."""
    child = _drawn_child(places, statistics, target, draft, request, row)
    drawn = child < NOWHERE
    index = tl.where(drawn, child, 0)
    steps = tl.zeros([1], tl.int64) + row
    states = row_states(places, statistics, target, draft, request, steps, steps * 0 + index, drawn)
    if places.least is None:
        left, drafted = block_probabilities(statistics, target, draft, states, request, row, tokens, drawn)
    else:
        left, drafted = kept_probabilities(
            places, statistics, target, draft, states, request, row, index, tokens, drawn
        )
    for node in range(draft.draft_len):
        place = request * draft.draft_len + node
        share = tl.load(places.offers + 2 * place)
        if (drafted_at(draft, request, node) == row) & (share >= 0):
            scale = tl.load(places.offers + 2 * place + 1).to(tl.float32)
            other = tl.zeros([1], tl.int64) + node
            token = tl.max(load_draft_tokens(draft, request, other, other >= 0), 0)
            one_hot = tl.where((tokens == token) & (token >= 0), 1.0, 0.0)
            is_drawn = mass_at(places, statistics, request * target.steps + node, statistics.PARTS) >= 0
            left = tl.maximum(left * share.to(tl.float32) - tl.where(is_drawn, drafted * scale, one_hot), 0.0)
    return left


@triton.jit
def _shard_left_kernel(
    blocks_ptr,  # float64 [batch, count, blocks], written
    places,  # ShardPlaces, with offers
    statistics,  # Statistics
    target,  # TargetView
    draft,  # DraftView
    DEPENDENT: tl.constexpr,
):
    wait_for_launch_before(DEPENDENT)
    place = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    request, row, usable = row_at(places, target, place)
    blocks_ptr += place * statistics.blocks + block
    if places.least is not None:
        usable &= keeps_of_block(places, statistics, request * target.steps + row, block)
    mass = tl.full([], 0.0, tl.float32)
    if usable:
        tokens = tokens_of(statistics, block)
        mass = tl.sum(_left_of_row(places, statistics, target, draft, request, row, tokens), 0)
    tl.store(blocks_ptr, mass.to(tl.float64))


@triton.jit
def _shard_draw_left_kernel(
    tokens_ptr,  # int64 [batch], written: -1 where no token has mass
    blocks_ptr,  # float64 [batch, blocks], of what is left
    goals_ptr,  # float64 [batch]
    places,  # ShardPlaces, one of each request, with offers
    statistics,  # Statistics
    target,  # TargetView
    draft,  # DraftView
    DEPENDENT: tl.constexpr,
):
    wait_for_launch_before(DEPENDENT)
    request, row, usable = row_at(places, target, tl.program_id(0).to(tl.int64))
    token = tl.full([], -1, tl.int64)
    if usable:
        block = tl.arange(0, statistics.BLOCK_COUNT)
        masses_ptr = blocks_ptr + request * statistics.blocks + block
        masses = tl.load(masses_ptr, mask=block < statistics.blocks, other=0.0)
        chosen, goal = choose_block(masses, tl.load(goals_ptr + request))
        tokens = tokens_of(statistics, chosen)
        left = _left_of_row(places, statistics, target, draft, request, row, tokens)
        token = first_exceeding(left.to(tl.float64), goal, tokens).to(tl.int64)
    tl.store(tokens_ptr + request, token)


@triton.jit
def _shard_exceeding_kernel(
    blocks_ptr,  # float64 [batch, count, blocks, 2, ratios], written: of what exceeds a draft, and of that
    nodes_ptr,  # int64 [batch, count]
    ratios_ptr,  # float64 [batch, count, ratios]
    num_ratios,
    places,  # ShardPlaces, with offers
    statistics,  # Statistics
    target,  # TargetView
    draft,  # DraftView
    DEPENDENT: tl.constexpr,
):
    wait_for_launch_before(DEPENDENT)
    place = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    request, row, usable = row_at(places, target, place)
    blocks_ptr += (place * statistics.blocks + block) * 2 * num_ratios
    ratios_ptr += place * num_ratios
    if places.least is not None:
        usable &= keeps_of_block(places, statistics, request * target.steps + row, block)
    tokens = tokens_of(statistics, block)
    left = tl.zeros(tokens.shape, tl.float32)
    drafted = tl.zeros(tokens.shape, tl.float32)
    if usable:
        left = _left_of_row(places, statistics, target, draft, request, row, tokens)
        left *= tl.load(places.shares + place).to(tl.float32)
        node = tl.load(nodes_ptr + place)
        drawn = mass_at(places, statistics, request * target.steps + node, statistics.PARTS) >= 0
        if drawn & (drafted_at(draft, request, node) == row):
            steps = tl.zeros([1], tl.int64) + row
            states = row_states(places, statistics, target, draft, request, steps, steps * 0 + node, drawn)
            own = states.draft
            drafted = drafted_probabilities(places, statistics, target, draft, own, request, row, node, tokens)
    for index in range(num_ratios):
        rest = left - drafted * tl.load(ratios_ptr + index).to(tl.float32)
        tl.store(blocks_ptr + index, tl.sum(tl.maximum(rest, 0.0), 0).to(tl.float64))
        below = tl.sum(tl.where(rest > 0, drafted, 0.0), 0)
        tl.store(blocks_ptr + num_ratios + index, below.to(tl.float64))


@triton.jit
def draft_masses_kernel(
    blocks_ptr,  # float64 [batch, count, blocks], written
    places,  # ShardPlaces, whose rows are nodes
    statistics,  # Statistics
    target,  # TargetView
    draft,  # DraftView
    DEPENDENT: tl.constexpr,
):
    wait_for_launch_before(DEPENDENT)
    place = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    request = place // places.count
    node = tl.load(places.rows + place)
    row = drafted_at(draft, request, node)
    usable = (row >= 0) & target_is_valid(target, request) & (target_temperature(target, request) != 0)
    usable &= mass_at(places, statistics, request * target.steps + node, statistics.PARTS) >= 0
    mass = tl.full([], 0.0, tl.float32)
    if usable:
        steps = tl.zeros([1], tl.int64) + row
        states = row_states(places, statistics, target, draft, request, steps, steps * 0 + node, usable)
        tokens = tokens_of(statistics, block)
        own = states.draft
        masses = drafted_probabilities(places, statistics, target, draft, own, request, row, node, tokens)
        for sibling in range(draft.draft_len):
            if (sibling < node) & (drafted_at(draft, request, sibling) == row):
                other = tl.zeros([1], tl.int64) + sibling
                token = tl.max(load_draft_tokens(draft, request, other, other >= 0), 0)
                masses = tl.where((tokens == token) & (token >= 0), 0.0, masses)
        mass = tl.sum(masses, 0)
    tl.store(blocks_ptr + place * statistics.blocks + block, mass.to(tl.float64))


def left_launches(blocks: Tensor, places: ShardPlaces, own: Views) -> Iterator[Launch]:
    return block_launches(_shard_left_kernel, blocks, places, own, BLOCK_REGISTERS)


def draw_left_launches(
    tokens: Tensor, blocks: Tensor, goals: Tensor, places: ShardPlaces, own: Views
) -> Iterator[Launch]:
    yield from edit_launches(own)
    arguments = {"tokens_ptr": tokens, "blocks_ptr": blocks, "goals_ptr": goals, "places": places, **own._asdict()}
    yield Launch(_shard_draw_left_kernel, (len(tokens),), arguments, DRAW_WARPS, BLOCK_REGISTERS)


def exceeding(
    member_logits: list[Tensor],
    draft_tokens: Tensor,
    row_of: Tensor,
    shares: Tensor,
    masses: Tensor,
    state: Tensor,
    nodes: Tensor,
    ratios: Tensor,
    *,
    least: Tensor | None = None,
    offers: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """`exceeding_of_shard`."""
    own = views(member_logits, draft_tokens, options, state)
    sums = masses.new_empty(*row_of.shape, own.statistics.blocks, 2, ratios.shape[-1])
    run(exceeding_launches(sums, nodes, ratios, places_of(row_of, shares, masses, least, offers), own), sums)
    return sums.sum(2)


def exceeding_launches(
    sums: Tensor, nodes: Tensor, ratios: Tensor, places: ShardPlaces, own: Views
) -> Iterator[Launch]:
    arguments = {"nodes_ptr": nodes, "ratios_ptr": ratios, "num_ratios": ratios.shape[-1]}
    registers = None if own.target.edits is None else EDITED_REGISTERS
    return block_launches(_shard_exceeding_kernel, sums, places, own, registers, **arguments)


def draft_masses(*given: Any, **options: Any) -> Tensor:
    """`mass_of_drafts_of_shard`."""
    return sums_at(draft_masses_kernel, *given, **options)
