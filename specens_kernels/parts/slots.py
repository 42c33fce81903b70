"""What filters act on: a slot's distribution, as a row of values that are compared and of masses that are summed."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from specens_kernels.parts.draft import (
    NO_DRAFTER,
    draft_temperature,
    drafter_logits,
    drafter_of,
    may_be_drafted,
    raw_draft_logits,
)
from specens_kernels.parts.sampling import INFINITY, filters_are_valid, logit_scale, min_p_of, top_k_of, top_p_of
from specens_kernels.parts.states import part_probability, plausible_threshold, target_state
from specens_kernels.parts.statistics import NO_TOKEN, row_softmax
from specens_kernels.parts.target import clean, everywhere, part_logits, raw_logits, target_is_valid, target_temperature

ROUNDED = tl.constexpr(2.0**-22)


class Source(NamedTuple):
    """A row's slot, in a kernel."""

    slot: Any
    request: Any
    step: Any
    row: Any
    drafter: Any  # a member, or none
    plane: Any  # of the maxima of its blocks
    maximum: Any  # the row's largest logit, as a number for powers
    temperature: Any
    scale: Any
    mass: Any  # of the row: a sum of powers, or 1 for a whole mixture; 0 where there is no distribution to filter
    threshold: Any  # of plausibility
    state: Any  # TargetState of a whole mixture


class SlotFilters(NamedTuple):
    """The filters of a slot, in a kernel."""

    top_k: Any  # float32, like
    top_p: Any
    min_p: Any
    min_p_first: Any  # whether min-p comes first


@triton.jit
def slot_filters(statistics, target, draft, request, slot):
    """The SlotFilters of a request."""
    top_k = tl.full([], 0.0, tl.float32)
    top_p = tl.full([], 1.0, tl.float32)
    min_p = tl.full([], 0.0, tl.float32)
    min_p_first = slot < 0
    if statistics.DRAFT_SLOT >= 0:
        top_k = top_k_of(draft.filters, request)
        top_p = top_p_of(draft.filters, request)
        min_p = min_p_of(draft.filters, request)
        min_p_first = (slot >= 0) & draft.filters.MIN_P_FIRST
    if statistics.TARGET_SLOTS > 0:
        own = slot < statistics.TARGET_SLOTS
        top_k = tl.where(own, top_k_of(target.filters, request), top_k)
        top_p = tl.where(own, top_p_of(target.filters, request), top_p)
        min_p = tl.where(own, min_p_of(target.filters, request), min_p)
        min_p_first = tl.where(own, (slot >= 0) & target.filters.MIN_P_FIRST, min_p_first)
    return SlotFilters(top_k, top_p, min_p, min_p_first)


@triton.jit
def slot_values(statistics, target, draft, source, tokens, used):
    """What a slot's filters compare, float32 like tokens: logits, or the probabilities of a whole mixture.

    Where `used` is false: -inf, or 0.
    """
    request, step = source.request, source.step
    is_draft = statistics.TARGET_SLOTS == 0  # decided when compiling unless both kinds of slots are there
    if statistics.TARGET_SLOTS > 0 and statistics.DRAFT_SLOT >= 0:
        is_draft = source.slot == statistics.DRAFT_SLOT
    if is_draft:
        values = tl.zeros(tokens.shape, tl.float32) - INFINITY
        if draft.logits is not None:
            values = raw_draft_logits(target, draft, request, step, tokens, used)
        else:
            for member in tl.static_range(len(target.logits)):
                if source.drafter == member:
                    values = raw_logits(target, member, request, step, tokens, used)
                    values = drafter_logits(target, draft, member, request, step, tokens, used, values)
        values = clean(values)
    else:
        values = tl.zeros(tokens.shape, tl.float32)
        if statistics.WHOLE:
            for part in tl.static_range(statistics.PARTS):
                logits = part_logits(target, part, request, step, tokens, used, -INFINITY)
                values += part_probability(source.state, part, logits)
        elif target.MIXTURE:
            for part in tl.static_range(statistics.PARTS):
                if source.slot == part:
                    values = clean(raw_logits(target, part, request, step, tokens, used))
        else:
            values = part_logits(target, 0, request, step, tokens, used, source.threshold)
    return values


@triton.jit
def slot_powers(statistics, source, values):
    """The mass of each value of a slot, in the units of its sum."""
    powers = tl.exp2((values - source.maximum) * source.scale)
    if statistics.WHOLE:
        powers = tl.where(source.slot == 0, values, powers)
    return powers


@triton.jit
def value_of_power(statistics, source, power):
    """A value that has at most this mass, float32, however it is rounded."""
    value = source.maximum + tl.div_rn(tl.log2(power), source.scale) - tl.abs(source.maximum) * ROUNDED
    if statistics.WHOLE:
        value = tl.where(source.slot == 0, power, value)
    return value


@triton.jit
def _slot_planes(statistics, slot, drafter):
    """The planes of the maxima and of the sums of the part, or of the draft, that a slot filters."""
    plane = slot
    sum_plane = slot + statistics.PARTS
    if statistics.DRAFT_SLOT >= 0:
        is_target = slot < statistics.TARGET_SLOTS
        if statistics.DRAFT_PLANE == 0:
            member = tl.where((drafter >= 0) & (drafter < statistics.PARTS), drafter, 0).to(tl.int32)
            plane = tl.where(is_target, plane, member)
            sum_plane = tl.where(is_target, sum_plane, member + statistics.PARTS)
        else:
            plane = tl.where(is_target, plane, statistics.DRAFT_PLANE)
            sum_plane = tl.where(is_target, sum_plane, statistics.DRAFT_PLANE + 1)
    return plane, sum_plane


@triton.jit
def slot_source(statistics, target, draft, request, step, slot):
    """The Source of a row's slot."""
    rows = tl.zeros([1], tl.int64) + request * target.steps + step
    temperature = target_temperature(target, request)
    drafter = step * 0 + NO_DRAFTER
    exists = slot >= 0
    if statistics.DRAFT_SLOT >= 0:
        drafts = (slot == statistics.DRAFT_SLOT) & (temperature != 0) & may_be_drafted(draft, request, step)
        if draft.logits is None:
            drafter = drafter_of(draft, request, step, drafts)
        given = drafts & ((drafter >= 0) & (drafter < len(target.logits)) | (draft.logits is not None))
        exists = (slot != statistics.DRAFT_SLOT) | given
        temperature = tl.where(drafts, draft_temperature(draft, request), temperature)
    scale = logit_scale(temperature)
    plane, sum_plane = _slot_planes(statistics, slot, drafter)
    maxima, totals = row_softmax(statistics, rows, plane, sum_plane, scale, everywhere(exists, rows))
    total = tl.max(totals, 0)
    state = 0.0
    threshold = tl.full([], -INFINITY, tl.float32)
    if statistics.WHOLE:
        state, status = target_state(statistics, target, request, rows, rows >= 0)
        alive = (tl.max(status, 0) & NO_TOKEN) == 0
        total = tl.where(slot == 0, tl.where(alive, 1.0, 0.0).to(tl.float64), total)
    elif statistics.TARGET_SLOTS > 0:
        threshold = plausible_threshold(statistics, target, rows, rows >= 0)
    return Source(
        slot=slot,
        request=request,
        step=step,
        row=request * target.steps + step,
        drafter=drafter,
        plane=plane,
        maximum=tl.max(maxima, 0),
        temperature=temperature,
        scale=scale,
        mass=total,
        threshold=threshold,
        state=state,
    )


@triton.jit
def slot_is_filtered(statistics, target, draft, source, filters):
    """Whether a slot's filters are in range and keep anything out; those of greedy requests do not count."""
    request = source.request
    filtered = ((filters.top_k > 0) | (filters.top_p < 1) | (filters.min_p > 0)) & (source.mass > 0)
    filtered &= target_is_valid(target, request) & (target_temperature(target, request) > 0)
    if statistics.DRAFT_SLOT >= 0:
        temperature = draft_temperature(draft, request)
        usable = (temperature > 0) & (temperature < INFINITY) & filters_are_valid(draft.filters, request)
        filtered &= (source.slot != statistics.DRAFT_SLOT) | usable
    return filtered
