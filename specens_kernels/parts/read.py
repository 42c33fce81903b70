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
    edited_drafts,
    load_draft_logits,
    may_be_drafted,
)
from specens_kernels.parts.sampling import FLOAT_MAX, INFINITY, logit_scale
from specens_kernels.parts.states import plausible_threshold
from specens_kernels.parts.statistics import (
    DRAFT_SHIFT,
    first_of,
    store_number,
    sum_of_powers,
    tokens_of,
    top_is_wanted,
)
from specens_kernels.parts.target import (
    INFINITE_LOGITS,
    NAN_LOGITS,
    clean,
    edited,
    everywhere,
    load_logits,
    member_weight,
    mix_logits,
    mix_reads,
    no_logits_mixed,
    row_edits,
    target_temperature,
)


@triton.jit
def _is_bad(maximum, powers):
    """1 if a block of raw logits has NaN, which only its sum shows, or +inf."""
    return tl.where((powers == powers) & (maximum < INFINITY), 0, 1)


@triton.jit
def _block_marks(statistics, target, draft, request, step, tokens, drafter, drafted, edits):
    """The marks of a block: the target's of members that have weight, the draft's of those that draft."""
    seen = 0
    for member in tl.static_range(len(target.logits)):
        weight = member_weight(target, request, member)
        drafts = drafter == member
        read = everywhere(mix_reads(target, member, weight) | drafts, tokens)
        logits = edited(target, request, read, edits, load_logits(target, member, request, step, tokens, read))
        marks = _all_marks(logits)
        seen |= tl.where(weight != 0, marks, 0)
        if statistics.DRAFT_PLANE >= 0 and draft.logits is None:
            if not draft.PROCESSED:
                own = drafter_logits(target, draft, member, request, step, tokens, everywhere(drafts, tokens), logits)
                marks = _all_marks(own)
            seen |= tl.where(drafts, marks, 0) << DRAFT_SHIFT
    if statistics.DRAFT_PLANE > 0 and draft.logits is not None:
        own = load_draft_logits(draft, request, step, tokens, drafted)
        seen |= _all_marks(edited_drafts(target, draft, request, drafted, edits, own)) << DRAFT_SHIFT
    return seen


@triton.jit
def _all_marks(logits):
    """The status bits of any of some logits."""
    invalid = tl.max((logits != logits).to(tl.int32), 0)
    infinite = tl.max((logits == INFINITY).to(tl.int32), 0)
    return invalid * NAN_LOGITS | infinite * INFINITE_LOGITS


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
def _store_top_token(statistics, row, block, values, value, tokens):
    tl.store(statistics.marks + (row * 2 + 1) * statistics.blocks + block, first_of(values, value, tokens))


@triton.jit
def _load_members(target, request, step, tokens, drafter, CLEAN: tl.constexpr):
    """What is read of all members, a tuple, before any of it is used.

    Not where logits have to be cleaned, which is rare: that has other uses for the registers.
    """
    loaded = ()
    if not CLEAN:
        for member in tl.static_range(len(target.logits)):
            read = mix_reads(target, member, member_weight(target, request, member)) | (drafter == member)
            loaded += (load_logits(target, member, request, step, tokens, everywhere(read, tokens)),)
    return loaded


@triton.jit
def _read_mixture(
    statistics, target, draft, request, step, row, block, tokens, drafter, loaded, edits, CLEAN: tl.constexpr
):
    """Statistics of each member in a mixture of probabilities.

    Returns whether a logit is bad, and the drafting member's logits.
    """
    temperature = target_temperature(target, request)
    bad = 0
    draft_logits = tl.zeros(tokens.shape, tl.float32) - INFINITY
    for member in tl.static_range(statistics.PARTS):
        weighted = member_weight(target, request, member) != 0
        drafts = drafter == member
        read = everywhere(weighted | drafts, tokens)
        logits = load_logits(target, member, request, step, tokens, read) if CLEAN else loaded[member]
        logits = edited(target, request, read, edits, logits)
        own = drafter_logits(target, draft, member, request, step, tokens, everywhere(drafts, tokens), logits)
        if CLEAN:
            logits = clean(logits)
            own = clean(own)
        draft_logits = tl.where(drafts, own, draft_logits)
        group_maxima = statistics.group_maxima[member] if statistics.PART_GROUPS else None
        scale = logit_scale(temperature)
        maximum, powers = _store_softmax(
            statistics, row, member, statistics.PARTS + member, block, logits, scale, group_maxima
        )
        bad |= _is_bad(maximum, powers)
    if statistics.TOP_PLANE == 0:  # noqa: SIM102 - decided when compiling
        if top_is_wanted(statistics, temperature):
            if target.temperatures is not None and not statistics.ALL_TOPS:
                # read again, from a cache: kept, they would take the registers of programs that want no such token
                logits = load_logits(target, 0, request, step, tokens, tokens >= 0)
                logits = clean(edited(target, request, tokens >= 0, edits, logits))
            _store_top_token(statistics, row, block, logits, maximum, tokens)
    return bad, draft_logits


@triton.jit
def _read_logit_mixture(
    statistics, target, draft, request, step, row, block, tokens, drafter, loaded, edits, CLEAN: tl.constexpr
):
    """Statistics of the mixed logits. Returns the same."""
    temperature = target_temperature(target, request)
    rows = tl.zeros([1], tl.int64) + row
    threshold = plausible_threshold(statistics, target, rows, rows >= 0)
    mixed = no_logits_mixed(target, tokens, tokens >= 0)
    largest = mixed
    draft_logits = tl.zeros(tokens.shape, tl.float32) - INFINITY
    for member in tl.static_range(len(target.logits)):
        weight = member_weight(target, request, member)
        drafts = drafter == member
        read = everywhere(mix_reads(target, member, weight) | drafts, tokens)
        logits = load_logits(target, member, request, step, tokens, read) if CLEAN else loaded[member]
        logits = edited(target, request, read, edits, logits)
        own = drafter_logits(target, draft, member, request, step, tokens, everywhere(drafts, tokens), logits)
        if CLEAN:
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
    if statistics.TOP_PLANE == 0:  # noqa: SIM102 - decided when compiling
        if top_is_wanted(statistics, temperature):
            _store_top_token(statistics, row, block, mixed, maximum, tokens)
    return _is_bad(tl.max(largest, 0), powers) | _is_bad(maximum, powers), draft_logits


@triton.jit
def read_block(statistics, target, draft, row, block, CLEAN: tl.constexpr):
    """Write a block's statistics. Unless CLEAN they hold only where the result, 1 for a logit of NaN or +inf, is 0."""
    request = row // target.steps
    step = row - request * target.steps
    tokens = tokens_of(statistics, block)
    tested = may_be_drafted(draft, request, step) & (target_temperature(target, request) != 0)
    drafter = NO_DRAFTER
    if statistics.DRAFT_PLANE >= 0 and draft.logits is None:
        drafter = drafter_of(draft, request, step, tested)
    edits = row_edits(target, request, step, tokens, tokens >= 0)
    loaded = _load_members(target, request, step, tokens, drafter, CLEAN)
    drafted = everywhere(tested, tokens)
    if statistics.DRAFT_PLANE > 0 and draft.logits is not None and not CLEAN:
        outside = load_draft_logits(draft, request, step, tokens, drafted)
    seen = 0
    if CLEAN:
        seen = _block_marks(statistics, target, draft, request, step, tokens, drafter, drafted, edits)
    tl.store(statistics.marks + row * 2 * statistics.blocks + block, seen)
    if target.MIXTURE:
        bad, draft_logits = _read_mixture(
            statistics, target, draft, request, step, row, block, tokens, drafter, loaded, edits, CLEAN
        )
    else:
        bad, draft_logits = _read_logit_mixture(
            statistics, target, draft, request, step, row, block, tokens, drafter, loaded, edits, CLEAN
        )
    if statistics.DRAFT_PLANE > 0:
        if draft.logits is not None:
            if CLEAN:
                outside = load_draft_logits(draft, request, step, tokens, drafted)
            draft_logits = edited_drafts(target, draft, request, drafted, edits, outside)
            if CLEAN:
                draft_logits = clean(draft_logits)
        plane = statistics.DRAFT_PLANE
        scale = logit_scale(draft_temperature(draft, request))
        group_maxima = statistics.draft_group_maxima if statistics.DRAFT_GROUPS else None
        maximum, powers = _store_softmax(statistics, row, plane, plane + 1, block, draft_logits, scale, group_maxima)
        bad |= _is_bad(maximum, powers)
    return bad
