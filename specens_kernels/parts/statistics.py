"""What one pass over the logits leaves for the kernels after it: a few numbers for each row and vocabulary block.

A part of the target is a member of a mixture of probabilities, or the one mix of logits. Powers are of 2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specens_kernels.parts.draft import NO_DRAFTER, DraftView
from specens_kernels.parts.sampling import FLOAT_MAX, INFINITY
from specens_kernels.parts.target import TargetView, batch_of
from specens_kernels.results import Status

NO_TOKEN = tl.constexpr(int(Status.NO_TOKEN))
TARGET_MARKS = tl.constexpr(int(Status.NAN_LOGITS | Status.INFINITE_LOGITS))
DRAFT_SHIFT = tl.constexpr(2)  # the draft's marks lie after the target's
NOWHERE = tl.constexpr(2**31 - 1)  # after every token
SMALLEST_POWER = tl.constexpr(-125.0)  # 2^-126 can round to 0 in float32
NO_PLANE = -1
NO_SLOT = tl.constexpr(NO_PLANE)
OF_DRAFTER = tl.constexpr(-2)  # the slot of the draft's filters where it is that of the part that drafted
SMALLEST_BLOCK, LARGEST_BLOCK, LARGEST_EDITED_BLOCK = 16, 4096, 2048  # what edits look up takes twice the registers
BLOCKS_WANTED = 8
GROUP = 128  # tokens whose largest value filters know before they read any; fewer in small vocabularies
LARGEST_INT16 = 2**15 - 1


class Statistics(NamedTuple):
    """Planes: a maximum for each part, a sum of powers for each part, then those of the fields that are there.

    What filters leave of a row is a cut and a mass: tokens whose value is below the cut have no probability. There is a
    slot for each part of the target (value: the logit, mass: a sum of powers as in a plane), or one for a whole mixture
    (the probability), and one for the draft.

    Groups are parts of a block. Of what is filtered their largest logits are kept, and the filters list those to read.
    """

    numbers: Tensor  # float32 [rows, planes, blocks]
    marks: Tensor  # int32 [rows, 2, blocks]: status bits; the block's most likely token, where it is wanted
    cuts: Tensor | None  # float32 [rows, slots]
    kept: Tensor | None  # float64 [rows, slots]
    group_maxima: tuple[Tensor, ...] | None  # of each part [rows, groups]; as the logits of a member, unedited
    draft_group_maxima: Tensor | None  # likewise of the draft's plane
    lists: Tensor | None  # int16, or int32 where groups are that many, [rows, slots, groups]
    blocks: int
    groups: int
    PARTS: tl.constexpr
    PLANES: tl.constexpr
    DRAFT_PLANE: tl.constexpr  # the draft's maximum, its sum after it; 0: the drafter's part; NO_PLANE: all one-hot
    PLAUSIBLE_PLANE: tl.constexpr  # member 0's maximum
    TOP_PLANE: tl.constexpr  # what the most likely token is chosen by; 0: a lone part; NO_PLANE: it is not wanted
    SLOTS: tl.constexpr
    TARGET_SLOTS: tl.constexpr  # 0: the target is not filtered
    DRAFT_SLOT: tl.constexpr  # OF_DRAFTER: that of the drafter's part; NO_PLANE: the draft is not filtered
    WHOLE: tl.constexpr  # the target's one slot is that of a whole mixture
    ALL_TOPS: tl.constexpr  # the most likely token of every row is wanted, else that of greedy requests
    BLOCK_VOCAB: tl.constexpr
    BLOCK_COUNT: tl.constexpr  # the power of two from `blocks`
    GROUP: tl.constexpr  # tokens
    GROUP_COUNT: tl.constexpr  # the power of two from `groups`
    PART_GROUPS: tl.constexpr  # whether maxima of the groups of parts are kept
    DRAFT_GROUPS: tl.constexpr  # and of the draft's plane


def new_statistics(target: TargetView, draft: DraftView, all_tops: bool = False) -> Statistics:
    """Unwritten statistics of all rows. Sizes follow from the vocabulary: no result depends on the batch."""
    parts = len(target.logits) if target.MIXTURE.value else 1
    tops = all_tops or target.temperatures is not None or target.temperature == 0
    drafts = has_draft_distribution(target, draft)
    shared = draft.logits is None and target.MIXTURE.value and draft.SAME_TEMPERATURE.value and draft.PROCESSED.value
    plausible = target.log_plausibility is not None
    planes = 2 * parts + 2 * (drafts and not shared)
    top_plane = NO_PLANE if not tops else 0 if parts == 1 else planes + plausible
    widest = max(target.vocab, draft.vocab) if drafts else target.vocab
    largest_block = LARGEST_BLOCK if target.edits is None else LARGEST_EDITED_BLOCK
    block_vocab = min(max(triton.next_power_of_2(triton.cdiv(widest, BLOCKS_WANTED)), SMALLEST_BLOCK), largest_block)
    blocks = triton.cdiv(widest, block_vocab)
    rows, device = batch_of(target) * target.steps, target.logits[0].device
    planes_and_more = planes + plausible + (top_plane > 0)
    target_slots = 0 if target.filters is None or greedy_only(target) else 1 if target.WHOLE.value else parts
    draft_slot = NO_PLANE if draft.filters is None or not drafts else target_slots
    if draft_slot >= 0 and shared and draft.SAME_FILTERS.value:
        draft_slot = OF_DRAFTER.value
    slots = target_slots + (draft_slot >= 0)
    group = min(GROUP, block_vocab)
    groups = triton.cdiv(widest, group)
    part_groups = target_slots > 0 or (draft_slot >= 0 and shared)
    draft_groups = draft_slot >= 0 and not shared
    listed = torch.int16 if groups <= LARGEST_INT16 else torch.int32

    def maxima(dtype: torch.dtype) -> Tensor:
        return torch.empty(rows, groups, dtype=torch.float32 if target.EDITED.value else dtype, device=device)

    part_dtypes = [logits.dtype for logits in target.logits] if target.MIXTURE.value else [torch.float32]
    draft_dtype = torch.float32 if draft.logits is None else draft.logits.dtype
    return Statistics(
        numbers=torch.empty(rows, planes_and_more, blocks, dtype=torch.float32, device=device),
        marks=torch.empty(rows, 2, blocks, dtype=torch.int32, device=device),
        cuts=torch.empty(rows, slots, dtype=torch.float32, device=device) if slots > 0 else None,
        kept=torch.empty(rows, slots, dtype=torch.float64, device=device) if slots > 0 else None,
        group_maxima=tuple(maxima(dtype) for dtype in part_dtypes) if part_groups else None,
        draft_group_maxima=maxima(draft_dtype) if draft_groups else None,
        lists=torch.empty(rows, slots, groups, dtype=listed, device=device) if slots > 0 else None,
        blocks=blocks,
        groups=groups,
        PARTS=tl.constexpr(parts),
        PLANES=tl.constexpr(planes_and_more),
        DRAFT_PLANE=tl.constexpr(NO_PLANE if not drafts else 0 if shared else 2 * parts),
        PLAUSIBLE_PLANE=tl.constexpr(planes if plausible else NO_PLANE),
        TOP_PLANE=tl.constexpr(top_plane),
        SLOTS=tl.constexpr(slots),
        TARGET_SLOTS=tl.constexpr(target_slots),
        DRAFT_SLOT=tl.constexpr(draft_slot),
        WHOLE=tl.constexpr(target_slots > 0 and target.WHOLE.value),
        ALL_TOPS=tl.constexpr(all_tops),
        BLOCK_VOCAB=tl.constexpr(block_vocab),
        BLOCK_COUNT=tl.constexpr(triton.next_power_of_2(blocks)),
        GROUP=tl.constexpr(group),
        GROUP_COUNT=tl.constexpr(triton.next_power_of_2(groups)),
        PART_GROUPS=tl.constexpr(part_groups),
        DRAFT_GROUPS=tl.constexpr(draft_groups),
    )


def greedy_only(target: TargetView) -> bool:
    """Whether every request is known to be greedy."""
    return target.temperatures is None and target.temperature == 0


def has_draft_distribution(target: TargetView, draft: DraftView) -> bool:
    """Whether some draft may come from a distribution that is not one-hot."""
    drafted = draft.logits is not None or draft.drafters is not None or draft.drafter != NO_DRAFTER.value
    one_hot = draft.temperatures is None and draft.temperature == 0
    return draft.draft_len > 0 and drafted and not greedy_only(target) and not one_hot


@triton.jit
def tokens_of(statistics, block):
    """The tokens of a block, int32 [BLOCK_VOCAB]."""
    return block * statistics.BLOCK_VOCAB + tl.arange(0, statistics.BLOCK_VOCAB)


@triton.jit
def first_of(values, value, tokens):
    """The first token of that value, after every token where the value is -inf."""
    return tl.min(tl.where((values == value) & (values > -INFINITY), tokens, NOWHERE), 0)


@triton.jit
def sum_of_powers(logits, maximum, scale):
    """The sum of 2^((logit - maximum) * scale) over a block's logits, 0 where all are -inf."""
    return tl.sum(tl.exp2((logits - tl.maximum(maximum, -FLOAT_MAX)) * scale), 0)


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
def row_marks(statistics, rows, used):
    """Status bits of the target's and of the draft's logits of rows, each int32 [rows]."""
    marks = tl.reduce_or(load_marks(statistics, rows, 0, used, 0), 1)
    return marks & TARGET_MARKS, marks >> DRAFT_SHIFT


@triton.jit
def top_is_wanted(statistics, temperature):
    """Whether the most likely token of a request's rows is wanted."""
    if statistics.ALL_TOPS:
        return temperature == temperature
    else:
        return temperature == 0


@triton.jit
def top_tokens(statistics, rows, used):
    """The most likely token of rows where it is wanted, the lowest on a tie; NOWHERE where there is none."""
    values = load_plane(statistics, rows, statistics.TOP_PLANE, used, -INFINITY)
    tokens = load_marks(statistics, rows, 1, used, NOWHERE)
    best = tl.max(values, 1)
    return tl.min(tl.where(values == best[:, None], tokens, NOWHERE), 1)
