"""Chains and trees on a GPU of whose rows this is a slice of the vocabulary: what is summed, and compared, elsewhere.

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

from specens_kernels.arguments import draft_of, ready_for_kernels, target_of
from specens_kernels.ops.target_logprobs.triton_edits import edit_launch
from specens_kernels.ops.target_logprobs.triton_kernel import BLOCK_REGISTERS, BLOCK_WARPS, statistics_launches
from specens_kernels.ops.verify_chain.triton_kernel import DRAW_WARPS
from specens_kernels.parts.chain import drafted_logits, load_draft_tokens
from specens_kernels.parts.draft import (
    NODES_AT_ONCE,
    DraftView,
    draft_temperature,
    draft_view,
    drafter_logits,
    drafter_of,
    raw_draft_logits,
    row_is_read,
)
from specens_kernels.parts.draw import (
    RowStates,
    block_probabilities,
    choose_block,
    first_exceeding,
    target_block_masses,
)
from specens_kernels.parts.launches import Launch, run, wait_for_launch_before
from specens_kernels.parts.sampling import FLOAT_MAX, INFINITY, logit_scale, over_temperature
from specens_kernels.parts.states import DraftState, TargetState, part_probability
from specens_kernels.parts.statistics import (
    NOWHERE,
    Statistics,
    first_of,
    new_statistics,
    row_marks,
    row_softmax,
    tokens_of,
    top_tokens,
)
from specens_kernels.parts.target import (
    TargetView,
    batch_of,
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

TOLD_WARPS = 4  # of the widest vocabularies a number of a plane a thread
RESIDUAL_REGISTERS = 80  # of a thread: three programs at once; where no number is told, some releases spill two


class ShardNumbers(NamedTuple):
    """What is told of each row, as `chain_of_shard` of C++ has it; a row's last part is the draft's."""

    largest: Tensor  # float64 [batch, steps, parts]
    sums: Tensor  # likewise
    tokens: Tensor  # int64 [batch, steps]
    status: Tensor  # int32 [batch, steps, 2]
    looked: Tensor  # float64 [batch, draft_len, parts]; of trees all nodes' logits in what a draft was drawn from


class ShardPlaces(NamedTuple):
    """A row of each of `count` places of each request."""

    rows: Tensor  # int64 [batch, count]
    shares: Tensor  # float64 [batch, count]
    masses: Tensor  # float64 [batch, steps, parts], the slice's part of the row's; negative: no token, a one-hot draft
    count: int
    least: Tensor | None  # float32 [batch, steps, parts], of the logits that are kept; None: all
    offers: Tensor | None = None  # float64 [batch, draft_len, 2] of trees, as `ShardPlaces` of C++ has them


class Scale(NamedTuple):
    """What makes log-probabilities of logits, float64 [batch, steps, parts]."""

    largest: Tensor  # the row's largest logit
    log_totals: Tensor  # the logarithm of its mass, relative to that of the largest


@triton.jit
def _part_softmax(statistics, target, draft, request, rows, part: tl.constexpr, used):
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
def drafted_at(draft, request, index):
    """The row of a request's draft, a scalar: where it was drawn; less than 0 for padding of trees."""
    if draft.parents is None:
        return index
    else:
        there = index < draft.draft_len
        return tl.load(draft.parents + request * draft.draft_len + index, mask=there, other=-2) + 1


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
        maximum, powers = _part_softmax(statistics, target, draft, request, rows, part, used)
        there = used & (powers > 0)
        tl.store(found.largest + rows * PARTS + part, tl.where(there, maximum, -INFINITY).to(tl.float64))
        tl.store(found.sums + rows * PARTS + part, tl.where(there, powers, 0.0))
    used = drafted & (rows < 0)
    maximum = tl.zeros([1], tl.float32) - INFINITY
    powers = tl.zeros([1], tl.float64)
    if statistics.DRAFT_PLANE >= 0:
        one_hot = (target_temperature(target, request) == 0) | (draft_temperature(draft, request) == 0)
        used = drafted & everywhere(one_hot == 0, rows)
        maximum, powers = _part_softmax(statistics, target, draft, request, drawn_rows, statistics.PARTS, used)
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
def _mass_at(places, statistics, rows, part):
    return tl.load(places.masses + rows * (statistics.PARTS + 1) + part)


@triton.jit
def _offset(mass, powers, there):
    """The logarithm of what powers are multiplied with."""
    log = tl.log2(tl.where(there, mass, 1.0)) - tl.log2(tl.where(there, powers, 1.0))
    return tl.where(there, log, -INFINITY)


@triton.jit
def _states(places, statistics, target, draft, request, steps, index, drawn):
    """The RowStates of the slice of a row; the draft's is zero unless it is drawn. index: of the draft, [1]."""
    rows = request * target.steps + steps
    all_rows = rows >= 0
    total = tl.zeros([1], tl.float64)
    for part in tl.static_range(statistics.PARTS):
        if target.MIXTURE:
            alive = _mass_at(places, statistics, rows, part) >= 0
            total += tl.where(alive, member_weight(target, request, part).to(tl.float64), 0.0)
        else:
            total += 1.0
    maxima = ()
    offsets = ()
    for part in tl.static_range(statistics.PARTS):
        maximum, powers = _part_softmax(statistics, target, draft, request, rows, part, all_rows)
        mass = _mass_at(places, statistics, rows, part)
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
        maximum, powers = _part_softmax(statistics, target, draft, request, rows, statistics.PARTS, used)
        mass = _mass_at(places, statistics, request * target.steps + index, statistics.PARTS)
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
def _draft_probabilities(places, statistics, target, draft, own, request, step, index, tokens):
    """Those of what is kept of a draft's distribution, of this index and drawn at this step; own: its state."""
    logits = draft_values(target, draft, request, step, tokens, tokens >= 0)
    powers = tl.exp2(tl.fma(logits - own.maximum, own.scale, own.offset.to(tl.float32)))
    if places.least is None:
        return powers
    else:
        least_ptr = places.least + (request * target.steps + index) * (statistics.PARTS + 1)
        return tl.where(logits >= tl.load(least_ptr + statistics.PARTS), powers, 0.0)


@triton.jit
def _kept_probabilities(places, statistics, target, draft, states, request, step, index, tokens, drawn):
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
            draft_probabilities = _draft_probabilities(
                places, statistics, target, draft, states.draft, request, step, index, tokens
            )
    return probabilities, draft_probabilities


@triton.jit
def _residual(places, statistics, target, draft, states, request, place, step, tokens, drawn, subtracts):
    """max(share * target - draft, 0) of each token, or the target where nothing is subtracted; float32."""
    if places.least is None:
        target_masses, draft_masses = block_probabilities(
            statistics, target, draft, states, request, step, tokens, drawn
        )
    else:
        target_masses, draft_masses = _kept_probabilities(
            places, statistics, target, draft, states, request, step, step, tokens, drawn
        )
    share = tl.load(places.shares + place).to(tl.float32)
    steps = tl.zeros([1], tl.int64) + step
    token = tl.max(load_draft_tokens(draft, request, steps, everywhere(subtracts & (drawn == 0), steps)), 0)
    one_hot = tl.where((tokens == token) & (token >= 0), 1.0, 0.0)
    share = tl.where(subtracts, share, 1.0)
    return tl.maximum(target_masses * share - tl.where(drawn, draft_masses, one_hot), 0.0)


@triton.jit
def _is_drawn(places, statistics, request, steps, step):
    return _mass_at(places, statistics, request * steps + step, statistics.PARTS) >= 0


@triton.jit
def row_at(places, target, place):
    """The request and step of a place, and whether the target has a distribution there."""
    request = place // places.count
    step = tl.load(places.rows + place)
    usable = (step < target.steps) & target_is_valid(target, request) & (target_temperature(target, request) != 0)
    return request, step, usable


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
    drawn = subtracts & _is_drawn(places, statistics, request, target.steps, step)
    states = _states(places, statistics, target, draft, request, steps, steps, drawn)
    tokens = tokens_of(statistics, block)
    masses = _residual(places, statistics, target, draft, states, request, place, step, tokens, drawn, subtracts)
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
    drawn = subtracts & _is_drawn(places, statistics, request, target.steps, step)
    states = _states(places, statistics, target, draft, request, steps, steps, drawn)
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
    left = _residual(places, statistics, target, draft, states, request, request, step, tokens, drawn, subtracts)
    tl.store(tokens_ptr + request, first_exceeding(left.to(tl.float64), goal, tokens).to(tl.int64))


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
    states = _states(places, statistics, target, draft, request, steps, steps * 0 + index, drawn)
    if places.least is None:
        left, drafted = block_probabilities(statistics, target, draft, states, request, row, tokens, drawn)
    else:
        left, drafted = _kept_probabilities(
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
            is_drawn = _mass_at(places, statistics, request * target.steps + node, statistics.PARTS) >= 0
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
    usable &= _mass_at(places, statistics, request * target.steps + node, statistics.PARTS) >= 0
    mass = tl.full([], 0.0, tl.float32)
    if usable:
        steps = tl.zeros([1], tl.int64) + row
        states = _states(places, statistics, target, draft, request, steps, steps * 0 + node, usable)
        tokens = tokens_of(statistics, block)
        own = states.draft
        masses = _draft_probabilities(places, statistics, target, draft, own, request, row, node, tokens)
        for sibling in range(draft.draft_len):
            if (sibling < node) & (drafted_at(draft, request, sibling) == row):
                other = tl.zeros([1], tl.int64) + sibling
                token = tl.max(load_draft_tokens(draft, request, other, other >= 0), 0)
                masses = tl.where((tokens == token) & (token >= 0), 0.0, masses)
        mass = tl.sum(masses, 0)
    tl.store(blocks_ptr + place * statistics.blocks + block, mass.to(tl.float64))


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
    states = _states(places, statistics, target, draft, request, tl.zeros([1], tl.int64) + step, step, never)
    tokens = tokens_of(statistics, block)
    masses = _residual(places, statistics, target, draft, states, request, place, step, tokens, never, never)
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


class Views(NamedTuple):
    """The arguments of a call as kernels take them."""

    statistics: Statistics
    target: TargetView
    draft: DraftView


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


def places_of(
    rows: Tensor, shares: Tensor, masses: Tensor, least: Tensor | None, offers: Tensor | None = None
) -> ShardPlaces:
    return ShardPlaces(rows, shares, masses, rows.shape[1], least, offers)


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


def left_launches(blocks: Tensor, places: ShardPlaces, own: Views) -> Iterator[Launch]:
    return block_launches(_shard_left_kernel, blocks, places, own, BLOCK_REGISTERS)


def block_launches(
    kernel: Any, blocks: Tensor, places: ShardPlaces, own: Views, registers: int | None = None
) -> Iterator[Launch]:
    """A kernel that gives a number for each block of the row of each place."""
    yield from edit_launches(own)
    grid, arguments = (blocks.shape[0] * blocks.shape[1], blocks.shape[2]), {"blocks_ptr": blocks, "places": places}
    yield Launch(kernel, grid, arguments | own._asdict(), BLOCK_WARPS, registers)


def edit_launches(own: Views) -> Iterator[Launch]:
    if own.target.edits is not None:
        yield edit_launch(own.target.edits)


def residual_launches(blocks: Tensor, subtracts: Tensor | None, places: ShardPlaces, own: Views) -> Iterator[Launch]:
    yield from edit_launches(own)
    grid = blocks.shape[0] * blocks.shape[1], blocks.shape[2]
    arguments = {"blocks_ptr": blocks, "subtracts_ptr": subtracts, "places": places, **own._asdict()}
    yield Launch(_shard_residual_kernel, grid, arguments, BLOCK_WARPS, RESIDUAL_REGISTERS)


def _sums(
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


def draft_masses(*given: Any, **options: Any) -> Tensor:
    """`mass_of_drafts_of_shard`."""
    return _sums(draft_masses_kernel, *given, **options)


def entropies(*given: Any, **options: Any) -> Tensor:
    """`entropies_of_shard`."""
    return _sums(shard_entropy_kernel, *given, **options)


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


def draw_left_launches(
    tokens: Tensor, blocks: Tensor, goals: Tensor, places: ShardPlaces, own: Views
) -> Iterator[Launch]:
    yield from edit_launches(own)
    arguments = {"tokens_ptr": tokens, "blocks_ptr": blocks, "goals_ptr": goals, "places": places, **own._asdict()}
    yield Launch(_shard_draw_left_kernel, (len(tokens),), arguments, DRAW_WARPS, BLOCK_REGISTERS)
