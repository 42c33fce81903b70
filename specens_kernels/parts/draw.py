"""A draw by inverse CDF from one uniform: first a block by its mass, then a token in it."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from specens_kernels.parts.chain import FROM_RESIDUAL, FROM_TARGET_WITHOUT_DRAFT, load_draft_tokens
from specens_kernels.parts.draft import (
    NO_DRAFTER,
    draft_temperature,
    drafter_logits,
    drafter_of,
    edited_drafts,
    load_draft_logits,
)
from specens_kernels.parts.rules import BLOCK, SMALLEST_RESIDUAL, target_share
from specens_kernels.parts.sampling import FLOAT_MAX, INFINITY, logit_scale
from specens_kernels.parts.states import (
    DraftState,
    TargetState,
    draft_state,
    in_kept_groups,
    keep_part,
    no_draft_state,
    part_probability,
    target_state,
)
from specens_kernels.parts.statistics import NO_SLOT, NOWHERE, SMALLEST_POWER, first_of, load_plane, tokens_of
from specens_kernels.parts.target import (
    clean,
    edited,
    everywhere,
    load_logits,
    member_weight,
    mix_logits,
    no_logits_mixed,
    row_edits,
    target_temperature,
)
from specens_kernels.results import Status

EMPTY_RESIDUAL = tl.constexpr(int(Status.EMPTY_RESIDUAL))


class RowStates(NamedTuple):
    """What makes the probabilities of one row, in a kernel."""

    target: Any  # TargetState
    draft: Any  # DraftState
    drafter: Any  # a member, or none


@triton.jit
def first_exceeding(masses, amount, indices):
    """The lowest index with mass whose running sum exceeds `amount`, else the last one with mass, else -1.

    masses: float64 [n], >= 0. indices: int32 [n], rising.
    """
    has_mass = masses > 0
    reached = has_mass & (tl.cumsum(masses, 0) > amount)
    first = tl.min(tl.where(reached, indices, NOWHERE), 0)
    last = tl.max(tl.where(has_mass, indices, -1), 0)
    return tl.where(first != NOWHERE, first, last)


@triton.jit
def choose_block(masses, amount):
    """The block in which the running sum of masses, float64 [BLOCK_COUNT], comes to exceed `amount`, int32, and what is
    left of that for its tokens."""
    block = tl.arange(0, masses.shape[0])
    chosen = tl.maximum(first_exceeding(masses, amount, block), 0)
    return chosen, amount - tl.sum(tl.where(block < chosen, masses, 0.0), 0)


@triton.jit
def target_block_masses(statistics, state, rows):
    """The target's mass in each block of one row, from its statistics: float64 [BLOCK_COUNT].

    A block has mass only where `block_probabilities` gives its most likely token a positive probability.
    """
    total = tl.zeros([1, statistics.BLOCK_COUNT], tl.float64)
    for part in tl.static_range(statistics.PARTS):
        block_maxima = load_plane(statistics, rows, part, rows >= 0, -INFINITY)
        sums = load_plane(statistics, rows, statistics.PARTS + part, rows >= 0, 0.0)
        power = tl.fma(block_maxima - state.maxima[part], state.scale, state.offsets[part].to(tl.float32))
        mass = sums.to(tl.float64) * tl.exp2(power).to(tl.float64)
        total += tl.where(power >= SMALLEST_POWER, mass, 0.0)
    return tl.reshape(total, [statistics.BLOCK_COUNT])


@triton.jit
def load_masses(masses_ptr, statistics, request, plane, used):
    """Block masses that a kernel before has summed: float64 [BLOCK_COUNT]."""
    PLANES: tl.constexpr = 2 if statistics.TARGET_SLOTS > 0 else 1
    block = tl.arange(0, statistics.BLOCK_COUNT)
    index = (request * PLANES + plane) * statistics.blocks + block
    mask = everywhere(used, block) & (block < statistics.blocks)
    return tl.load(masses_ptr + index, mask=mask, other=0.0).to(tl.float64)


@triton.jit
def row_states(statistics, target, draft, request, step, subtracts):
    """The RowStates of a request's row; step is int64 [1]."""
    rows = request * target.steps + step
    state, _ = target_state(statistics, target, request, rows, rows >= 0)
    own_state = no_draft_state()
    drafter = NO_DRAFTER
    if statistics.DRAFT_PLANE >= 0:
        used = everywhere(subtracts, step)
        own_state = draft_state(statistics, draft, request, step, rows, step.to(tl.int32), used).state
        drafter = tl.max(drafter_of(draft, request, step, used), 0)
    return RowStates(state, own_state, drafter)


@triton.jit
def _numbers_at(outcome, request, index):
    """A pointer to a number of a request's row state, a block of one."""
    return outcome.states + request * outcome.STATE_NUMBERS + index + tl.arange(0, 1)


@triton.jit
def store_row_states(outcome, statistics, request, states):
    """Keep RowStates, but for scales and drafter, for the programs after; in float32."""
    state = states.target
    for part in tl.static_range(statistics.PARTS):
        tl.store(_numbers_at(outcome, request, 2 * part), state.maxima[part])
        tl.store(_numbers_at(outcome, request, 2 * part + 1), state.offsets[part].to(tl.float32))
    FIRST: tl.constexpr = 2 * statistics.PARTS
    tl.store(_numbers_at(outcome, request, FIRST), state.threshold)
    for index in tl.static_range(len(state.cuts)):
        tl.store(_numbers_at(outcome, request, FIRST + 1 + index), state.cuts[index].to(tl.float32))
    if statistics.DRAFT_PLANE >= 0:
        LAST: tl.constexpr = FIRST + 1 + len(state.cuts)
        tl.store(_numbers_at(outcome, request, LAST), states.draft.maximum)
        tl.store(_numbers_at(outcome, request, LAST + 1), states.draft.offset.to(tl.float32))
        tl.store(_numbers_at(outcome, request, LAST + 2), states.draft.cut)


@triton.jit
def load_row_states(outcome, statistics, target, draft, request, step, subtracts):
    """The RowStates of the row of the next token; step is int64 [1]."""
    maxima = ()
    offsets = ()
    for part in tl.static_range(statistics.PARTS):
        maxima += (tl.load(_numbers_at(outcome, request, 2 * part)),)
        offsets += (tl.load(_numbers_at(outcome, request, 2 * part + 1)),)
    FIRST: tl.constexpr = 2 * statistics.PARTS
    CUTS: tl.constexpr = statistics.TARGET_SLOTS + (1 if statistics.WHOLE else 0)
    threshold = tl.load(_numbers_at(outcome, request, FIRST))
    cuts = ()
    for index in tl.static_range(CUTS):
        cuts += (tl.load(_numbers_at(outcome, request, FIRST + 1 + index)),)
    own_state = no_draft_state()
    drafter = NO_DRAFTER
    if statistics.DRAFT_PLANE >= 0:
        LAST: tl.constexpr = FIRST + 1 + CUTS
        maximum = tl.load(_numbers_at(outcome, request, LAST))
        offset = tl.load(_numbers_at(outcome, request, LAST + 1))
        cut = tl.load(_numbers_at(outcome, request, LAST + 2))
        own_state = DraftState(maximum, offset, logit_scale(draft_temperature(draft, request)), cut)
        drafter = tl.max(drafter_of(draft, request, step, everywhere(subtracts, step)), 0)
    scale = logit_scale(target_temperature(target, request))
    return RowStates(TargetState(maxima, offsets, scale, threshold, cuts), own_state, drafter)


@triton.jit
def block_probabilities(
    statistics, target, draft, states, request, step, tokens, subtracts, ALL_OF_DRAFT: tl.constexpr = False
):
    """The probability of each token under the target and, where `subtracts`, under the draft; float32.

    states: the RowStates of this row.
    ALL_OF_DRAFT: the draft's are right also where the target's filters keep no token of a group, else 0 there.
    """
    state, own_state, drafter = states
    threshold, cuts = state.threshold, state.cuts
    probabilities = tl.zeros(tokens.shape, tl.float32)
    draft_probabilities = tl.zeros(tokens.shape, tl.float32)
    mixed = no_logits_mixed(target, tokens, tokens >= 0)
    draft_logits = tl.zeros(tokens.shape, tl.float32) - INFINITY
    edits = row_edits(target, request, step, tokens, tokens >= 0)
    kept = in_kept_groups(statistics, cuts, request * target.steps + step, tokens)
    for member in tl.static_range(len(target.logits)):
        weight = member_weight(target, request, member)
        drafts = subtracts & (drafter == member)
        used = everywhere((weight != 0) | drafts, tokens)
        if not ALL_OF_DRAFT or draft.logits is not None:
            used &= kept
        logits = load_logits(target, member, request, step, tokens, used)
        logits = clean(edited(target, request, used, edits, logits))
        own = drafter_logits(target, draft, member, request, step, tokens, everywhere(drafts, tokens), logits)
        draft_logits = tl.where(drafts, clean(own), draft_logits)
        if target.MIXTURE:
            probabilities += part_probability(state, member, keep_part(statistics, logits, cuts, member))
        else:
            mixed = tl.minimum(mix_logits(target, member, mixed, logits, weight, threshold), FLOAT_MAX)
    if not target.MIXTURE:
        probabilities = part_probability(state, 0, keep_part(statistics, mixed, cuts, 0))
    if statistics.WHOLE:
        rate = tl.div_rn(1.0, cuts[1].to(tl.float32))
        probabilities = tl.where(probabilities >= cuts[0], probabilities * rate, 0.0)
    if statistics.DRAFT_PLANE >= 0:
        if draft.logits is not None:
            drafted = everywhere(subtracts, tokens)
            if not ALL_OF_DRAFT:
                drafted &= kept
            draft_logits = load_draft_logits(draft, request, step, tokens, drafted)
            draft_logits = clean(edited_drafts(target, draft, request, drafted, edits, draft_logits))
        if statistics.DRAFT_SLOT != NO_SLOT:
            draft_logits = tl.where(draft_logits >= own_state.cut, draft_logits, -INFINITY)
        draft_probabilities = tl.exp2(
            tl.fma(draft_logits - own_state.maximum, own_state.scale, own_state.offset.to(tl.float32))
        )
    return probabilities, draft_probabilities


@triton.jit
def _masses_without(token, masses, statistics, target, draft, states, request, step):
    """The target's block masses, float64 [BLOCK_COUNT], without one token's."""
    block = token // statistics.BLOCK_VOCAB
    tokens = tokens_of(statistics, block)
    states = RowStates(states.target, states.draft, NO_DRAFTER)
    probabilities, _ = block_probabilities(statistics, target, draft, states, request, step, tokens, token < 0)
    mass = tl.sum(tl.where(tokens == token, 0.0, probabilities), 0)
    return tl.where(tl.arange(0, statistics.BLOCK_COUNT) == block, mass.to(tl.float64), masses)


@triton.jit
def draw_token(outcome, masses_ptr, statistics, target, draft, rule, request, step, kind, uniform):
    """The next token, int32, of a request that is not greedy, and status bits.

    masses_ptr: float32 [batch, planes, blocks], the residual's block masses and, of filtered targets, the target's.
    """
    subtracts = kind == FROM_RESIDUAL
    share = target_share(rule, draft, request, step)
    steps = tl.zeros([1], tl.int64) + step
    if outcome.states is None:
        states = row_states(statistics, target, draft, request, steps, subtracts)
    else:
        states = load_row_states(outcome, statistics, target, draft, request, steps, subtracts)
    if statistics.TARGET_SLOTS > 0:
        masses = load_masses(masses_ptr, statistics, request, 1, kind >= 0)
    else:
        masses = target_block_masses(statistics, states.target, request * target.steps + steps)
    excluded = -1
    status = 0
    if draft.tokens is not None:
        target_masses = masses
        if kind == FROM_TARGET_WITHOUT_DRAFT:
            excluded = tl.max(load_draft_tokens(draft, request, steps, steps >= 0), 0).to(tl.int32)
            masses = _masses_without(excluded, masses, statistics, target, draft, states, request, step)
        if masses_ptr is not None:
            own = load_masses(masses_ptr, statistics, request, 0, subtracts)
            masses = tl.where(subtracts, own, masses)
        if tl.sum(masses, 0) * tl.where(kind == FROM_TARGET_WITHOUT_DRAFT, share, 1.0) <= SMALLEST_RESIDUAL:
            masses = target_masses
            excluded = -1
            status = EMPTY_RESIDUAL
        subtracts = subtracts & (status == 0)
    block, amount = choose_block(masses, uniform * tl.sum(masses, 0))
    tokens = tokens_of(statistics, block)
    probabilities, draft_probabilities = block_probabilities(
        statistics, target, draft, states, request, step, tokens, subtracts
    )
    if rule.KIND == BLOCK:
        probabilities *= tl.where(subtracts, share, 1.0)
    residual = tl.where(tokens == excluded, 0.0, tl.maximum(probabilities - draft_probabilities, 0.0))
    token = first_exceeding(residual.to(tl.float64), amount, tokens)
    likely = first_of(probabilities, tl.max(probabilities, 0), tokens)
    return tl.where(token >= 0, token, likely), status
