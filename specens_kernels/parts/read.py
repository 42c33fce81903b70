"""One block of one row, read once: its statistics.

Raw logits are summed as they are. NaN and +inf show in the sum and in the maximum; only then is the block read again,
cleaned, and marked.
"""

from __future__ import annotations

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
from specens_kernels.parts.sampling import FLOAT_MAX, INFINITY, logit_scale
from specens_kernels.parts.states import plausible_threshold
from specens_kernels.parts.statistics import DRAFT_SHIFT, NOWHERE, store_number, sum_of_powers, top_is_wanted
from specens_kernels.parts.target import (
    clean,
    everywhere,
    marks_of,
    member_weight,
    mix_logits,
    mix_reads,
    no_logits_mixed,
    raw_logits,
    target_temperature,
)


@triton.jit
def _is_bad(maximum, powers):
    """1 if a block of raw logits has NaN, which only its sum shows, or +inf."""
    return tl.where((powers == powers) & (maximum < INFINITY), 0, 1)


@triton.jit
def _member_marks(logits, drafter_logits, weighted, drafts):
    """The marks of a member's logits, the target's where it has weight and the draft's where it drafts."""
    marks = marks_of(logits)
    return tl.where(weighted, marks, 0) | (tl.where(drafts, marks_of(drafter_logits), 0) << DRAFT_SHIFT)


@triton.jit
def _store_softmax(statistics, row, plane, sum_plane, block, logits, scale, group_maxima):
    """group_maxima: where the largest logits of the block's groups are kept, or None."""
    if group_maxima is None:
        maximum = tl.max(logits, 0)
    else:
        GROUPS: tl.constexpr = statistics.BLOCK_VOCAB // statistics.GROUP
        maxima = tl.max(tl.reshape(logits, [GROUPS, statistics.GROUP]), 1)
        group = block * GROUPS + tl.arange(0, GROUPS)
        # half precision has no largest float32, which stands for +inf
        kept = tl.where(maxima < FLOAT_MAX, maxima, INFINITY)
        tl.store(group_maxima + row * statistics.groups + group, kept, mask=group < statistics.groups)
        maximum = tl.max(maxima, 0)
    powers = sum_of_powers(logits, maximum, scale)
    store_number(statistics, row, plane, block, maximum)
    store_number(statistics, row, sum_plane, block, powers)
    return maximum, powers


@triton.jit
def store_top_token(statistics, row, block, values, value, tokens, wanted):
    """The first token of that value, behind every token where the value is -inf."""
    if wanted:
        top = tl.min(tl.where((values == value) & (values > -INFINITY), tokens, NOWHERE), 0)
        tl.store(statistics.marks + (row * 2 + 1) * statistics.blocks + block, top)


@triton.jit
def _read_mixture(statistics, target, draft, request, step, row, block, tokens, drafter, CLEAN: tl.constexpr):
    """Statistics of each member in a mixture of probabilities.

    Returns whether a logit is bad, the marks of each token, and the drafting member's logits.
    """
    temperature = target_temperature(target, request)
    bad = 0
    marks = tokens & 0
    draft_logits = tl.zeros(tokens.shape, tl.float32) - INFINITY
    for member in tl.static_range(statistics.PARTS):
        weighted = member_weight(target, request, member) != 0
        drafts = drafter == member
        logits = raw_logits(target, member, request, step, tokens, everywhere(weighted | drafts, tokens))
        own = drafter_logits(target, draft, member, request, step, tokens, everywhere(drafts, tokens), logits)
        if CLEAN:
            marks |= _member_marks(logits, own, weighted, drafts)
            logits = clean(logits)
            own = clean(own)
        draft_logits = tl.where(drafts, own, draft_logits)
        group_maxima = statistics.group_maxima[member] if statistics.PART_GROUPS else None
        scale = logit_scale(temperature)
        maximum, powers = _store_softmax(
            statistics, row, member, statistics.PARTS + member, block, logits, scale, group_maxima
        )
        bad |= _is_bad(maximum, powers)
    if statistics.TOP_PLANE == 0:
        store_top_token(statistics, row, block, logits, maximum, tokens, top_is_wanted(statistics, temperature))
    return bad, marks, draft_logits


@triton.jit
def _read_logit_mixture(statistics, target, draft, request, step, row, block, tokens, drafter, CLEAN: tl.constexpr):
    """Statistics of the mixed logits. Returns the same."""
    temperature = target_temperature(target, request)
    rows = tl.zeros([1], tl.int64) + row
    threshold = plausible_threshold(statistics, target, rows, rows >= 0)
    marks = tokens & 0
    mixed = no_logits_mixed(target, tokens, tokens >= 0)
    largest = mixed
    draft_logits = tl.zeros(tokens.shape, tl.float32) - INFINITY
    for member in tl.static_range(len(target.logits)):
        weight = member_weight(target, request, member)
        drafts = drafter == member
        used = mix_reads(target, member, weight)
        logits = raw_logits(target, member, request, step, tokens, everywhere(used | drafts, tokens))
        own = drafter_logits(target, draft, member, request, step, tokens, everywhere(drafts, tokens), logits)
        if CLEAN:
            marks |= _member_marks(logits, own, weight != 0, drafts)
            logits = clean(logits)
            own = clean(own)
        draft_logits = tl.where(drafts, own, draft_logits)
        # NaN counts here too: it does not reach the sum of powers where another member excludes the token
        largest = tl.maximum(largest, tl.where(logits == logits, logits, INFINITY))
        mixed = mix_logits(target, member, mixed, logits, weight, threshold)
        if CLEAN:
            mixed = tl.minimum(mixed, FLOAT_MAX)
    group_maxima = statistics.group_maxima[0] if statistics.PART_GROUPS else None
    scale = logit_scale(temperature)
    maximum, powers = _store_softmax(statistics, row, 0, 1, block, mixed, scale, group_maxima)
    if statistics.TOP_PLANE == 0:
        store_top_token(statistics, row, block, mixed, maximum, tokens, top_is_wanted(statistics, temperature))
    return _is_bad(tl.max(largest, 0), powers) | _is_bad(maximum, powers), marks, draft_logits


@triton.jit
def read_block(statistics, target, draft, row, block, CLEAN: tl.constexpr):
    """Write a block's statistics. Unless CLEAN they hold only where the result, 1 for a logit of NaN or +inf, is 0."""
    request = row // target.steps
    step = row % target.steps
    tokens = block * statistics.BLOCK_VOCAB + tl.arange(0, statistics.BLOCK_VOCAB)
    tested = may_be_drafted(draft, request, step) & (target_temperature(target, request) != 0)
    drafter = NO_DRAFTER
    if statistics.DRAFT_PLANE >= 0 and draft.logits is None:
        drafter = drafter_of(draft, request, step, tested)
    if target.MIXTURE:
        bad, marks, draft_logits = _read_mixture(
            statistics, target, draft, request, step, row, block, tokens, drafter, CLEAN
        )
    else:
        bad, marks, draft_logits = _read_logit_mixture(
            statistics, target, draft, request, step, row, block, tokens, drafter, CLEAN
        )
    if statistics.DRAFT_PLANE > 0:
        if draft.logits is not None:
            draft_logits = raw_draft_logits(target, draft, request, step, tokens, everywhere(tested, tokens))
            if CLEAN:
                marks |= marks_of(draft_logits) << DRAFT_SHIFT
                draft_logits = clean(draft_logits)
        plane = statistics.DRAFT_PLANE
        scale = logit_scale(draft_temperature(draft, request))
        group_maxima = statistics.draft_group_maxima if statistics.DRAFT_GROUPS else None
        maximum, powers = _store_softmax(statistics, row, plane, plane + 1, block, draft_logits, scale, group_maxima)
        bad |= _is_bad(maximum, powers)
    seen = 0
    if CLEAN:
        for flag in tl.static_range(2 * DRAFT_SHIFT):
            seen |= tl.max(marks & (1 << flag), 0)
    tl.store(statistics.marks + row * 2 * statistics.blocks + block, seen)
    return bad
