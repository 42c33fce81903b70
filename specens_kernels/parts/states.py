"""What makes probabilities of logits, from the statistics of their rows and what filters keep of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from specens_kernels.parts.draft import NO_DRAFTER, draft_temperature, drafter_of
from specens_kernels.parts.sampling import FLOAT_MAX, INFINITY, logit_scale, over_temperature
from specens_kernels.parts.statistics import NO_SLOT, NO_TOKEN, OF_DRAFTER, load_plane, row_softmax
from specens_kernels.parts.target import LN_2, clean, member_weight, part_logits, target_temperature
from specens_kernels.results import Status

MEMBER_WITHOUT_TOKEN = tl.constexpr(int(Status.MEMBER_WITHOUT_TOKEN))
INVALID_DRAFT_DISTRIBUTION = tl.constexpr(int(Status.INVALID_DRAFT_DISTRIBUTION))


class TargetState(NamedTuple):
    """What makes probabilities of logits: the sum over parts of 2^((logit - maximum) * scale + offset), in a kernel."""

    maxima: Any  # float32 [rows], a tuple with one entry a part, like
    offsets: Any  # float64 [rows]
    scale: Any  # the request's
    threshold: Any  # of plausibility, float32 [rows]
    cuts: Any  # as `target_cuts` gives them


class DraftState(NamedTuple):
    """The same of a draft distribution, which has one part."""

    maximum: Any  # float32 [rows]
    offset: Any  # float64 [rows]
    scale: Any
    cut: Any  # float32 [rows]


class RowDrafts(NamedTuple):
    """What the drafts of rows were drawn from, in a kernel."""

    state: Any  # DraftState
    soft: Any  # bool [rows]: whether it is a distribution, else the draft is one-hot
    status: Any  # bits, int32 [rows]


@triton.jit
def no_draft_state():
    """Of drafts that are all one-hot: nothing looks at it."""
    return DraftState(0.0, 0.0, 0.0, 0.0)


@triton.jit
def kept_powers(statistics, rows, slot, used, other):
    """The sum of the powers that filters keep in a slot, float64 [rows]."""
    return tl.load(statistics.kept + rows * statistics.SLOTS + slot, mask=used, other=other)


@triton.jit
def cut_of(statistics, rows, slot, used):
    """The smallest value that filters keep in a slot, float32 [rows]."""
    return tl.load(statistics.cuts + rows * statistics.SLOTS + slot, mask=used, other=-INFINITY)


@triton.jit
def target_cuts(statistics, rows, used):
    """The cut of each of the target's slots, a tuple; after that of a whole mixture the mass that is kept."""
    cuts = ()
    for slot in tl.static_range(statistics.TARGET_SLOTS):
        cuts += (cut_of(statistics, rows, slot, used),)
    if statistics.WHOLE:
        cuts += (kept_powers(statistics, rows, 0, used, 1.0),)
    return cuts


@triton.jit
def block_is_cut(statistics, row, block):
    """Whether the filters of a target that is one softmax keep no token of a block."""
    cut = row < 0
    if statistics.TARGET_SLOTS == 1 and statistics.PARTS == 1:
        largest = tl.load(statistics.numbers + row * statistics.PLANES * statistics.blocks + block)
        cut = largest < tl.load(statistics.cuts + row * statistics.SLOTS)
    return cut


@triton.jit
def in_kept_groups(statistics, cuts, row, tokens):
    """Whether each token is in a group of which the filters of a target that is one softmax keep any; else all are."""
    kept = tokens >= 0
    if statistics.TARGET_SLOTS == 1 and statistics.PARTS == 1:
        group = tokens // statistics.GROUP
        maxima_ptr = statistics.group_maxima[0] + row * statistics.groups
        maxima = tl.load(maxima_ptr + group, mask=group < statistics.groups, other=-INFINITY)
        kept = tl.max_constancy(clean(maxima.to(tl.float32)) >= cuts[0], statistics.GROUP)
    return kept


@triton.jit
def keep_part(statistics, logits, cuts, part):
    """The logits of a part, those below its own cut as -inf."""
    if statistics.TARGET_SLOTS > 0 and not statistics.WHOLE:
        logits = tl.where(logits >= cuts[part], logits, -INFINITY)
    return logits


@triton.jit
def part_probability(state, part, logits):
    """A part's share in the target's probability of each token, float32; of a whole mixture before its filters."""
    return tl.exp2(tl.fma(logits - state.maxima[part], state.scale, state.offsets[part].to(tl.float32)))


@triton.jit
def plausible_threshold(statistics, target, rows, used):
    """The smallest plausible logit of member 0, float32 [rows]; -inf where there is no such constraint."""
    if target.log_plausibility is not None:
        largest = tl.max(load_plane(statistics, rows, statistics.PLAUSIBLE_PLANE, used, -INFINITY), 1)
        return largest + target.log_plausibility
    else:
        return tl.zeros(rows.shape, tl.float32) - INFINITY


@triton.jit
def target_state(statistics, target, request, rows, used):
    """The TargetState of rows of a request, and status bits int32 [rows]."""
    scale = logit_scale(target_temperature(target, request))
    maxima = ()
    logs = ()
    total = tl.zeros(rows.shape, tl.float64)
    dead = tl.zeros(rows.shape, tl.int32)
    for part in tl.static_range(statistics.PARTS):
        maximum, powers = row_softmax(statistics, rows, part, statistics.PARTS + part, scale, used)
        if statistics.TARGET_SLOTS > 0 and not statistics.WHOLE:
            powers = kept_powers(statistics, rows, part, used, 0.0)
        weight = tl.zeros(rows.shape, tl.float64) + 1.0
        if target.MIXTURE:
            weight = tl.zeros(rows.shape, tl.float64) + member_weight(target, request, part)
        alive = (weight > 0) & (powers > 0)
        log = tl.log2(tl.where(alive, weight, 1.0)) - tl.log2(tl.where(alive, powers, 1.0))
        maxima += (tl.where(alive, maximum, FLOAT_MAX),)  # where any logit is below it, so that no NaN arises
        logs += (tl.where(alive, log, -INFINITY),)
        total += tl.where(alive, weight, 0.0)
        dead |= ((weight > 0) & (powers == 0)).to(tl.int32)
    log_total = tl.log2(tl.where(total > 0, total, 1.0))
    offsets = ()
    for part in tl.static_range(statistics.PARTS):
        offsets += (logs[part] - log_total,)
    status = tl.where(total > 0, dead * MEMBER_WITHOUT_TOKEN, NO_TOKEN)
    threshold = plausible_threshold(statistics, target, rows, used)
    return TargetState(maxima, offsets, scale, threshold, target_cuts(statistics, rows, used)), status


@triton.jit
def draft_state(statistics, draft, request, step, rows, marks, used):
    """The RowDrafts of rows."""
    given = used
    drafter = tl.zeros_like(rows)
    if draft.logits is None:
        drafter = drafter_of(draft, request, step, used)
        given = used & (drafter != NO_DRAFTER)
    return drafter_state(statistics, draft, request, drafter, rows, marks, given)


@triton.jit
def drafter_state(statistics, draft, request, drafter, rows, marks, given):
    """The same of that member as the drafter, where there is a distribution; given: whether there is a drafter."""
    scale = logit_scale(draft_temperature(draft, request))
    if statistics.DRAFT_PLANE == 0:
        known = (drafter >= 0) & (drafter < statistics.PARTS)
        maximum, powers = row_softmax(statistics, rows, drafter, statistics.PARTS + drafter, scale, given & known)
    else:
        plane = statistics.DRAFT_PLANE
        maximum, powers = row_softmax(statistics, rows, plane, plane + 1, scale, given)
    cut = tl.zeros_like(maximum) - INFINITY
    if statistics.DRAFT_SLOT != NO_SLOT:
        slot = tl.zeros_like(rows) + statistics.DRAFT_SLOT
        if statistics.DRAFT_SLOT == OF_DRAFTER:
            slot = drafter
        filtered = given & (powers > 0)
        powers = kept_powers(statistics, rows, slot, filtered, 0.0)
        cut = cut_of(statistics, rows, slot, filtered)
    soft = given & (powers > 0)  # the sum is 0 where the drafter is not a member, too
    offset = -tl.log2(tl.where(soft, powers, 1.0))
    status = marks | tl.where(soft, 0, INVALID_DRAFT_DISTRIBUTION)
    return RowDrafts(DraftState(maximum, offset, scale, cut), soft, tl.where(given, status, 0))


@triton.jit
def blocks_with_top(statistics, state, rows):
    """Which blocks of one row may hold a mixture's most likely token, [BLOCK_COUNT], by what no token of it exceeds."""
    upper = tl.zeros([1, statistics.BLOCK_COUNT], tl.float32)
    reached = tl.zeros([1, statistics.BLOCK_COUNT], tl.float32)
    for part in tl.static_range(statistics.PARTS):
        block_maxima = load_plane(statistics, rows, part, rows >= 0, -INFINITY)
        probability = part_probability(state, part, block_maxima)
        upper += probability
        reached = tl.maximum(reached, probability)
    margin = 1.0 + 1e-5  # wider than what rounding adds
    may_hold = (upper > 0) & (upper * margin >= tl.max(reached, 1)[:, None])
    return tl.reshape(may_hold, [statistics.BLOCK_COUNT])


@triton.jit
def log_power(logits, maximum, offset, temperature, DTYPE: tl.constexpr):
    """log(2^((logit - maximum) * scale + offset)); logits near the largest float overflow only where they must."""
    rate = over_temperature(1.0, temperature).to(DTYPE)
    return (logits.to(DTYPE) - maximum.to(DTYPE)) * rate + (offset * LN_2).to(DTYPE)


@triton.jit
def log_probability(statistics, target, state, request, step, tokens, used, DTYPE: tl.constexpr):
    """Log of the target's probability of each token, computed as DTYPE; -inf where `used` is false."""
    temperature = target_temperature(target, request)
    total = tl.zeros(tokens.shape, DTYPE) - INFINITY
    probability = tl.zeros(tokens.shape, tl.float32)
    for part in tl.static_range(statistics.PARTS):
        logits = part_logits(target, part, request, step, tokens, used, state.threshold)
        logits = keep_part(statistics, logits, state.cuts, part)
        if statistics.WHOLE:
            probability += part_probability(state, part, logits)
        power = log_power(logits, state.maxima[part], state.offsets[part], temperature, DTYPE)
        if statistics.PARTS == 1:
            total = power
        else:
            larger = tl.maximum(total, power)
            centre = tl.where(larger > -INFINITY, larger, 0.0)
            powers = tl.exp(total - centre) + tl.exp(power - centre)
            total = tl.where(larger > -INFINITY, centre + tl.log(tl.maximum(powers, 1.0)), -INFINITY)
    if statistics.WHOLE:
        total = tl.where(probability >= state.cuts[0], total - tl.log(state.cuts[1]).to(DTYPE), -INFINITY)
    return tl.minimum(total, 0.0)  # rounding can lift it above
