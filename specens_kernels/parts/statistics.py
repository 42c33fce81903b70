"""What one pass over the logits leaves for the kernels behind it: a few numbers for each row and vocabulary block.

A part of the target is a member of a mixture of probabilities, or the one mix of logits. Powers are of 2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specens_kernels.parts.target import (
    FLOAT_MAX,
    INFINITY,
    LN_2,
    NO_DRAFTER,
    DraftView,
    TargetView,
    draft_temperature,
    drafter_of,
    logit_scale,
    member_weight,
    over_temperature,
    part_logits,
    target_temperature,
)
from specens_kernels.types import Status

NO_TOKEN = tl.constexpr(int(Status.NO_TOKEN))
MEMBER_WITHOUT_TOKEN = tl.constexpr(int(Status.MEMBER_WITHOUT_TOKEN))
INVALID_DRAFT_DISTRIBUTION = tl.constexpr(int(Status.INVALID_DRAFT_DISTRIBUTION))
TARGET_MARKS = tl.constexpr(int(Status.NAN_LOGITS | Status.INFINITE_LOGITS))
DRAFT_SHIFT = tl.constexpr(2)  # the draft's marks lie behind the target's
NOWHERE = tl.constexpr(2**31 - 1)  # behind every token
SMALLEST_POWER = tl.constexpr(-125.0)  # 2^-126 can round to 0 in float32
NO_PLANE = -1
BLOCK_LIMITS = (16, 4096)
BLOCKS_WANTED = 8


class Statistics(NamedTuple):
    """Planes: a maximum for each part, a sum of powers for each part, then those of the fields that are there."""

    numbers: Tensor  # float32 [rows, planes, blocks]
    marks: Tensor  # int32 [rows, 2, blocks]: status bits; the block's most likely token, for greedy requests
    blocks: int
    PARTS: tl.constexpr
    PLANES: tl.constexpr
    DRAFT_PLANE: tl.constexpr  # the draft's maximum, its sum behind it; 0: the drafter's part; NO_PLANE: all one-hot
    PLAUSIBLE_PLANE: tl.constexpr  # member 0's maximum
    TOP_PLANE: tl.constexpr  # what the most likely token is chosen by; 0: a lone part; NO_PLANE: no request is greedy
    BLOCK_VOCAB: tl.constexpr
    BLOCK_COUNT: tl.constexpr  # the power of two from `blocks`


def new_statistics(target: TargetView, draft: DraftView) -> Statistics:
    """Unwritten statistics of all rows. Sizes follow from the vocabulary: no result depends on the batch."""
    parts = len(target.logits) if target.MIXTURE.value else 1
    greedy = target.temperatures is not None or target.temperature == 0
    drafts = has_draft_distribution(target, draft)
    shared = draft.logits is None and target.MIXTURE.value and draft.SAME_TEMPERATURE.value
    plausible = target.log_plausibility is not None
    planes = 2 * parts + 2 * (drafts and not shared)
    top_plane = NO_PLANE if not greedy else 0 if parts == 1 else planes + plausible
    widest = max(target.vocab, draft.vocab) if drafts else target.vocab
    block_vocab = min(max(triton.next_power_of_2(triton.cdiv(widest, BLOCKS_WANTED)), BLOCK_LIMITS[0]), BLOCK_LIMITS[1])
    blocks = triton.cdiv(widest, block_vocab)
    rows, device = target.logits[0].shape[0] * target.steps, target.logits[0].device
    planes_and_more = planes + plausible + (top_plane > 0)
    return Statistics(
        numbers=torch.empty(rows, planes_and_more, blocks, dtype=torch.float32, device=device),
        marks=torch.empty(rows, 2, blocks, dtype=torch.int32, device=device),
        blocks=blocks,
        PARTS=tl.constexpr(parts),
        PLANES=tl.constexpr(planes_and_more),
        DRAFT_PLANE=tl.constexpr(NO_PLANE if not drafts else 0 if shared else 2 * parts),
        PLAUSIBLE_PLANE=tl.constexpr(planes if plausible else NO_PLANE),
        TOP_PLANE=tl.constexpr(top_plane),
        BLOCK_VOCAB=tl.constexpr(block_vocab),
        BLOCK_COUNT=tl.constexpr(triton.next_power_of_2(blocks)),
    )


def has_draft_distribution(target: TargetView, draft: DraftView) -> bool:
    """Whether some draft may come from a distribution that is not one-hot."""
    drafted = draft.logits is not None or draft.drafters is not None or draft.drafter != NO_DRAFTER.value
    greedy = target.temperatures is None and target.temperature == 0
    one_hot = draft.temperatures is None and draft.temperature == 0
    return draft.draft_len > 0 and drafted and not greedy and not one_hot


@triton.jit
def union(bits, axis: tl.constexpr, FIELD: tl.constexpr):
    """The bitwise or along an axis of at most 2^FIELD numbers with 64 / FIELD bits, as one sum of counts."""
    counts = bits.to(tl.int64) & 0
    for flag in tl.static_range(64 // FIELD):
        counts |= ((bits >> flag) & 1).to(tl.int64) << (flag * FIELD)
    counts = tl.sum(counts, axis)
    total = counts & 0
    for flag in tl.static_range(64 // FIELD):
        seen = ((counts >> (flag * FIELD)) & ((1 << FIELD) - 1)) != 0
        total |= seen.to(tl.int64) << flag
    return total.to(tl.int32)


@triton.jit
def block_softmax(logits, scale):
    """The maximum of a block's logits and the sum of 2^((logit - maximum) * scale), 0 where all are -inf."""
    maximum = tl.max(logits, 0)
    return maximum, tl.sum(tl.exp2((logits - tl.maximum(maximum, -FLOAT_MAX)) * scale), 0)


@triton.jit
def store_number(statistics, row, plane, block, value):
    tl.store(statistics.numbers + (row * statistics.PLANES + plane) * statistics.blocks + block, value)


@triton.jit
def load_plane(statistics, rows, plane, used, other):
    """float32 [rows, BLOCK_COUNT]; rows and used are [rows]."""
    block = tl.arange(0, statistics.BLOCK_COUNT)
    row_ptr = statistics.numbers + (rows * statistics.PLANES + plane) * statistics.blocks
    mask = used[:, None] & (block < statistics.blocks)[None, :]
    return tl.load(row_ptr[:, None] + block[None, :], mask=mask, other=other)


@triton.jit
def load_marks(statistics, rows, which, used, other):
    """int32 [rows, BLOCK_COUNT]."""
    block = tl.arange(0, statistics.BLOCK_COUNT)
    row_ptr = statistics.marks + (rows * 2 + which) * statistics.blocks
    mask = used[:, None] & (block < statistics.blocks)[None, :]
    return tl.load(row_ptr[:, None] + block[None, :], mask=mask, other=other)


@triton.jit
def row_softmax(statistics, rows, plane, sum_plane, scale, used):
    """The maximum, float32, and the sum of powers, float64, of rows from their blocks'."""
    maxima = load_plane(statistics, rows, plane, used, -INFINITY)
    sums = load_plane(statistics, rows, sum_plane, used, 0.0)
    maximum = tl.maximum(tl.max(maxima, 1), -FLOAT_MAX)
    powers = tl.exp2((maxima - maximum[:, None]) * scale)
    return maximum, tl.sum(sums.to(tl.float64) * powers.to(tl.float64), 1)


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
    """What makes probabilities of logits: probability = sum over parts of 2^((logit - maximum) * scale + offset).

    Returns (maxima, offsets, scale, threshold) and status bits int32 [rows]: tuples with one entry a part of float32
    and float64 [rows], the request's scale, and the threshold of plausibility.
    """
    scale = logit_scale(target_temperature(target, request))
    maxima = ()
    logs = ()
    total = tl.zeros(rows.shape, tl.float64)
    dead = tl.zeros(rows.shape, tl.int32)
    for part in tl.static_range(statistics.PARTS):
        maximum, powers = row_softmax(statistics, rows, part, statistics.PARTS + part, scale, used)
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
    return (maxima, offsets, scale, threshold), status


@triton.jit
def row_marks(statistics, rows, used):
    """Status bits of the target's and of the draft's logits of rows, each int32 [rows]."""
    marks = union(load_marks(statistics, rows, 0, used, 0), 1, 16)
    return marks & TARGET_MARKS, marks >> DRAFT_SHIFT


@triton.jit
def draft_state(statistics, draft, request, step, rows, marks, used):
    """The same of the draft distribution: (maximum, offset, scale), whether there is one (else the draft is one-hot),
    and status bits; each [rows]."""
    scale = logit_scale(draft_temperature(draft, request))
    given = used
    drafter = tl.zeros_like(rows)
    if draft.logits is None:
        drafter = drafter_of(draft, request, step, used)
        given = used & (drafter != NO_DRAFTER)
    if statistics.DRAFT_PLANE == 0:
        known = (drafter >= 0) & (drafter < statistics.PARTS)
        maximum, powers = row_softmax(statistics, rows, drafter, statistics.PARTS + drafter, scale, used & known)
    else:
        plane = statistics.DRAFT_PLANE
        maximum, powers = row_softmax(statistics, rows, plane, plane + 1, scale, used)
    soft = given & (powers > 0)  # the sum is 0 where the drafter is not a member, too
    offset = -tl.log2(tl.where(soft, powers, 1.0))
    status = marks | tl.where(soft, 0, INVALID_DRAFT_DISTRIBUTION)
    return (maximum, offset, scale), soft, tl.where(given, status, 0)


@triton.jit
def may_hold_top(statistics, state, rows, block):
    """Whether a block of one row may hold a mixture's most likely token, by what no token of it can exceed."""
    maxima, offsets, scale, _ = state
    upper = tl.zeros([1, statistics.BLOCK_COUNT], tl.float32)
    reached = tl.zeros([1, statistics.BLOCK_COUNT], tl.float32)
    for part in tl.static_range(statistics.PARTS):
        block_maxima = load_plane(statistics, rows, part, rows >= 0, -INFINITY)
        probability = tl.exp2(tl.fma(block_maxima - maxima[part], scale, offsets[part].to(tl.float32)))
        upper += probability
        reached = tl.maximum(reached, probability)
    own = tl.where(tl.arange(0, statistics.BLOCK_COUNT)[None, :] == block, upper, 0.0)
    margin = 1.0 + 1e-5  # wider than what rounding adds
    return tl.max(tl.max(own, 1), 0) * margin >= tl.max(tl.max(reached, 1), 0)


@triton.jit
def top_tokens(statistics, rows, used):
    """The most likely token of rows of greedy requests, the lowest on a tie; NOWHERE where there is none."""
    values = load_plane(statistics, rows, statistics.TOP_PLANE, used, -INFINITY)
    tokens = load_marks(statistics, rows, 1, used, NOWHERE)
    best = tl.max(values, 1)
    return tl.min(tl.where(values == best[:, None], tokens, NOWHERE), 1)


@triton.jit
def log_power(logits, maximum, offset, temperature, DTYPE: tl.constexpr):
    """log(2^((logit - maximum) * scale + offset)); logits near the largest float overflow only where they must."""
    rate = over_temperature(1.0, temperature).to(DTYPE)
    return (logits.to(DTYPE) - maximum.to(DTYPE)) * rate + (offset * LN_2).to(DTYPE)


@triton.jit
def log_probability(statistics, target, state, request, step, tokens, used, DTYPE: tl.constexpr):
    """Log of the target's probability of each token, computed as DTYPE; -inf where `used` is false."""
    maxima, offsets, _, threshold = state
    temperature = target_temperature(target, request)
    total = tl.zeros(tokens.shape, DTYPE) - INFINITY
    for part in tl.static_range(statistics.PARTS):
        logits = part_logits(target, part, request, step, tokens, used, threshold)
        power = log_power(logits, maxima[part], offsets[part], temperature, DTYPE)
        if statistics.PARTS == 1:
            total = power
        else:
            larger = tl.maximum(total, power)
            centre = tl.where(larger > -INFINITY, larger, 0.0)
            powers = tl.exp(total - centre) + tl.exp(power - centre)
            total = tl.where(larger > -INFINITY, centre + tl.log(tl.maximum(powers, 1.0)), -INFINITY)
    return total
