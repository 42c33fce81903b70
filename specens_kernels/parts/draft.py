"""The drafts of a batch as kernels take them: where they lie, how many there are, and what they were drawn from."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specens_kernels import arguments
from specens_kernels.arguments import Draft, Target
from specens_kernels.parts.sampling import (
    INFINITY,
    FilterView,
    any_size,
    filter_view,
    parameter_number,
    request_number,
    same_filters,
    size_of,
    stride_of,
)
from specens_kernels.parts.target import TargetView, edited, load_logits, row_edits

NO_DRAFTER = tl.constexpr(arguments.NO_DRAFTER)
NODES_AT_ONCE = tl.constexpr(128)  # one a thread


class PackedRows(NamedTuple):
    """Where the rows of requests lie when they lie one after the other."""

    offsets: Tensor  # int64 [batch + 1]
    total: int  # rows; `any_size`, like `drafts`
    drafts: int  # where these are packed too
    bonus_each: int  # rows that each request then has more than drafts


class Slots(NamedTuple):
    """Where the draft logits of requests lie."""

    indices: Tensor  # int64 [batch]
    count: int


class DraftView(NamedTuple):
    """The draft tokens and what they were drawn from: a member, outside logits, or nothing (one-hot). Default: none."""

    draft_len: int = 0
    lens: Tensor | None = None  # int64 [batch]
    tokens: Tensor | None = None  # int64 or int32 [batch, draft_len], or packed
    tokens_stride_batch: int = 0
    tokens_stride_step: int = 0
    drafter: int = NO_DRAFTER.value
    drafters: Tensor | None = None  # int64 like tokens
    logits: Tensor | None = None  # [batch, draft_len, vocab], packed, or [slots, draft_len or more, vocab]
    logits_stride_batch: int = 0
    logits_stride_step: int = 0
    vocab: int = 0
    temperature: float = 0.0
    temperatures: Tensor | None = None  # float32 [batch]
    temperatures_stride: int = 0
    filters: FilterView | None = None
    packed: PackedRows | None = None
    slots: Slots | None = None
    parents: Tensor | None = None  # int64 [batch, draft_len] of trees: row i + 1 is that after draft i
    marked: Tensor | None = None  # int8 [batch, steps]: the rows that are read, where not all are
    FILTERED: tl.constexpr = tl.constexpr(False)
    PACKED: tl.constexpr = tl.constexpr(False)  # the drafts, like their rows
    PROCESSED: tl.constexpr = tl.constexpr(True)  # drawn from logits with the target's edits and mask
    SAME_TEMPERATURE: tl.constexpr = tl.constexpr(True)  # known to be the target's
    SAME_FILTERS: tl.constexpr = tl.constexpr(True)  # known to be those of the target's parts


def draft_view(target: TargetView, draft: Draft) -> DraftView:
    """From an operator's arguments."""
    number, temperatures = parameter_number(draft.sampling.temperature), draft.sampling.temperatures
    filters = filter_view(draft.sampling)
    stride_batch, stride_step, vocab = 0, 0, 0
    if draft.logits is not None:
        stride_batch = draft.logits.stride(0) if draft.logits.dim() == 3 else 0
        stride_step, vocab = draft.logits.stride(-2), draft.logits.shape[-1]
    return DraftView(
        draft_len=draft.draft_len,
        lens=draft.lens,
        tokens=draft.tokens,
        tokens_stride_batch=draft.tokens.stride(0) if draft.tokens.dim() == 2 else 0,
        tokens_stride_step=draft.tokens.stride(-1),
        drafter=draft.drafter,
        drafters=draft.drafters,
        logits=draft.logits,
        logits_stride_batch=stride_batch,
        logits_stride_step=stride_step,
        vocab=vocab,
        temperature=number,
        temperatures=temperatures,
        temperatures_stride=stride_of(temperatures),
        filters=filters,
        packed=packed_rows(target, draft),
        slots=None if draft.slots is None else Slots(draft.slots, draft.logits.shape[0]),
        FILTERED=tl.constexpr(filters is not None),
        PACKED=tl.constexpr(draft.tokens.dim() == 1),
        PROCESSED=tl.constexpr(bool(draft.processed) or (target.edits is None and target.mask is None)),
        SAME_TEMPERATURE=tl.constexpr(temperatures is target.temperatures and number == target.temperature),
        SAME_FILTERS=tl.constexpr(not target.WHOLE.value and same_filters(filters, target.filters)),
    )


def packed_rows(target: TargetView, draft: Draft) -> PackedRows | None:
    """None where the rows are dense."""
    if target.row_offsets is None:
        return None
    total, packed = target.logits[0].shape[0], draft.tokens.dim() == 1
    drafts = draft.tokens.shape[0] if packed else 0
    return PackedRows(target.row_offsets, any_size(total), any_size(drafts), int(packed and drafts != total))


def without_distribution(draft: DraftView) -> DraftView:
    """The same tokens, wherever they came from."""
    return draft._replace(logits=None, drafters=None, drafter=NO_DRAFTER.value)


def dense_drafts(target: Target, draft: Draft) -> Tensor:
    """The draft tokens [batch, draft_len]; any where a request has none, or its packed rows do not fit."""
    if draft.tokens.dim() == 2:
        return draft.tokens.contiguous()
    first, total, packed = target.row_offsets[:-1], target.member_logits[0].shape[0], draft.tokens
    if packed.shape[0] != total:  # a bonus row each
        first = first - torch.arange(first.shape[0], device=first.device)
    indices = first[:, None] + torch.arange(draft.draft_len, device=first.device)
    last = packed.shape[0] - 1
    return packed.new_zeros(indices.shape) if last < 0 else packed[indices.clamp(0, last)]


def row_limit(target: Target, draft: Draft) -> int:
    """The most rows of a request."""
    return target.member_logits[0].shape[1] if target.row_offsets is None else draft.draft_len + 1


@triton.jit
def draft_temperature(draft, request):
    return request_number(draft.temperature, draft.temperatures, draft.temperatures_stride, request)


@triton.jit
def drafts_are_valid(draft, request):
    """Whether a request's drafts are there, and the temperature that they were drawn at is in range."""
    temperature = draft_temperature(draft, request)
    length = chain_len(draft, request)
    return (temperature >= 0) & (temperature < INFINITY) & (length >= 0) & (length <= draft.draft_len)


@triton.jit
def raw_draft_logits(target, draft, request, step, tokens, used):
    """An outside drafter's logits, likewise, edited if the drafts were drawn from such."""
    logits = load_draft_logits(draft, request, step, tokens, used)
    edits = 0
    if draft.PROCESSED:
        edits = row_edits(target, request, step, tokens, used)
    return edited_drafts(target, draft, request, used, edits, logits)


@triton.jit
def load_draft_logits(draft, request, step, tokens, used):
    """The same as they lie."""
    slot = request
    row = step
    if draft.slots is not None:
        slot = tl.load(draft.slots.indices + request)
    else:
        row = draft_index(draft, request, step)
    row_ptr = draft.logits + slot * draft.logits_stride_batch + row * draft.logits_stride_step
    return tl.load(row_ptr + tokens, mask=used & (tokens < draft.vocab), other=-INFINITY)


@triton.jit
def edited_drafts(target, draft, request, used, edits, logits):
    """float32."""
    logits = logits.to(tl.float32)
    if draft.PROCESSED:
        logits = edited(target, request, used, edits, logits)
    return logits


@triton.jit
def drafter_logits(target, draft, member, request, step, tokens, used, logits):
    """A member's logits as those that it drew drafts from; logits: as `raw_logits` gives them."""
    if not draft.PROCESSED:
        logits = load_logits(target, member, request, step, tokens, used).to(tl.float32)
    return logits


@triton.jit
def draft_index(draft, request, step):
    """The index of a draft along the steps of what is [batch, draft_len] or packed."""
    if draft.PACKED:
        step = step + tl.load(draft.packed.offsets + request) - request * draft.packed.bonus_each
    return step


@triton.jit
def drafter_of(draft, request, step, used):
    """The member that drafted at `step`, or another number where none did; like `step`."""
    if draft.drafters is not None:
        drafters_ptr = draft.drafters
        if not draft.PACKED:
            drafters_ptr += request * draft.draft_len
        return tl.load(drafters_ptr + draft_index(draft, request, step), mask=used, other=NO_DRAFTER)
    else:
        return tl.where(used, step * 0 + draft.drafter, NO_DRAFTER)


@triton.jit
def chain_len(draft, request):
    """The number of a request's draft tokens, int64; -1 where its rows, drafts or slot are not there."""
    if draft.lens is not None:
        length = tl.load(draft.lens + request)
    elif draft.packed is not None:
        length = _packed_count(draft, request)
        if draft.PACKED:
            length -= draft.packed.bonus_each
        else:
            length = tl.maximum(length - 1, 0)
    else:
        length = request * 0 + draft.draft_len
    if draft.packed is not None:
        length = tl.where(_packed_fit(draft, request, length), length, -1)
    if draft.slots is not None:
        slot = tl.load(draft.slots.indices + request)
        length = tl.where((slot >= 0) & (slot < draft.slots.count), length, -1)
    return length


@triton.jit
def _packed_count(draft, request):
    """The number of a request's packed rows, int64; less than 0 where they cannot be."""
    first = tl.load(draft.packed.offsets + request)
    end = tl.load(draft.packed.offsets + request + 1)
    return tl.where((first >= 0) & (end >= first) & (end <= size_of(draft.packed.total)), end - first, -1)


@triton.jit
def _packed_fit(draft, request, length):
    """Whether a request's rows are there for so many drafts, and its packed drafts too."""
    rows = _packed_count(draft, request)
    fit = (rows >= 0) & ((rows == length) | (rows == length + 1))
    if draft.PACKED:
        first = draft_index(draft, request, request * 0)
        fit &= (first >= 0) & (first + length <= size_of(draft.packed.drafts))
    return fit


@triton.jit
def row_count(target, draft, request, length):
    """The number of a request's rows, int64, that has `length` drafts; 0 where packed rows do not fit."""
    if draft.packed is None:
        return length + target.steps - draft.draft_len
    else:
        return tl.where((length >= 0) & (length <= draft.draft_len), _packed_count(draft, request), 0)


@triton.jit
def row_is_read(target, draft, request, step):
    """Whether a row is there and needed; step is a scalar."""
    read = step < row_count(target, draft, request, chain_len(draft, request))
    if draft.parents is not None:
        parent = tl.load(draft.parents + request * draft.draft_len + step - 1, mask=step > 0, other=-1)
        read &= (step == 0) | ((parent >= -1) & (parent < step - 1))
    if draft.marked is not None:
        read &= tl.load(draft.marked + request * target.steps + step) != 0
    return read


@triton.jit
def _has_children(draft, request, row):
    """Whether a row of a tree has any; row is a scalar."""
    found = tl.zeros([NODES_AT_ONCE], tl.int32)
    for first in range(0, draft.draft_len, NODES_AT_ONCE):
        node = first + tl.arange(0, NODES_AT_ONCE)
        parents_ptr = draft.parents + request * draft.draft_len
        parents = tl.load(parents_ptr + node, mask=node < draft.draft_len, other=-2)
        found |= (parents == row - 1).to(tl.int32)
    return tl.max(found, 0) != 0


@triton.jit
def may_be_drafted(draft, request, step):
    """Whether there is a draft to read at a row; of dense ones after a request's length, too."""
    if draft.parents is not None:
        return _has_children(draft, request, step)
    elif draft.packed is None:
        return step < draft.draft_len
    else:
        return step < chain_len(draft, request)
