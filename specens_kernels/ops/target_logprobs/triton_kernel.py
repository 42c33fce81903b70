"""The pass over the logits that every distribution starts with, and dense log-probabilities, on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specens_kernels.arguments import ready_for_kernels, target_of
from specens_kernels.ops.target_logprobs.triton_edits import edit_launch
from specens_kernels.parts.draft import DraftView, row_is_read
from specens_kernels.parts.launches import Launch, run, wait_for_launch_before
from specens_kernels.parts.read import read_block
from specens_kernels.parts.sampling import INFINITY
from specens_kernels.parts.search import SEARCH_BLOCK, search
from specens_kernels.parts.slots import slot_filters, slot_is_filtered, slot_source
from specens_kernels.parts.states import blocks_with_top, keep_part, log_probability, part_probability, target_state
from specens_kernels.parts.statistics import (
    NOWHERE,
    Statistics,
    first_of,
    new_statistics,
    store_number,
    tokens_of,
    top_is_wanted,
    top_tokens,
)
from specens_kernels.parts.target import (
    TargetView,
    batch_of,
    clean,
    everywhere,
    mixes_many,
    part_logits,
    raw_logits,
    target_is_valid,
    target_temperature,
    target_view,
)

BLOCK_REGISTERS = 128  # of a thread: two programs at once; the compiler's own choice of a number spills a few
BLOCK_WARPS, HALF_WARPS = 8, 4  # of what reads a block: four loads of 16 bytes a thread, also of half precision
HALF_REGISTERS = 128  # of its threads, so that a multiprocessor holds four such programs
MOST_HALVES = 3  # members and drafts that these hold
FILTER_WARPS = 16  # a row's search waits for all threads again and again, and few of them fit a multiprocessor


@triton.jit
def _plausible_kernel(
    statistics,  # Statistics, its plausible plane written
    target,  # TargetView
    draft,  # DraftView
    DEPENDENT: tl.constexpr,
):
    wait_for_launch_before(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    request = row // target.steps
    step = row % target.steps
    if not row_is_read(target, draft, request, step):
        return
    tokens = tokens_of(statistics, block)
    largest = tl.max(raw_logits(target, 0, request, step, tokens, tokens >= 0), 0)  # passes over NaN
    store_number(statistics, row, statistics.PLAUSIBLE_PLANE, block, clean(largest))


@triton.jit
def _statistics_kernel(
    statistics,  # Statistics, written
    target,  # TargetView
    draft,  # DraftView
    DEPENDENT: tl.constexpr,
):
    wait_for_launch_before(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    if not row_is_read(target, draft, row // target.steps, row % target.steps):
        return
    if read_block(statistics, target, draft, row, block, False) != 0:
        # 0, which the compiler does not know: what the first read has computed is not kept in registers for this one
        again = tl.load(statistics.marks, mask=statistics.blocks < 1, other=0)
        read_block(statistics, target, draft, row + again, block + again, True)


@triton.jit
def _filter_kernel(
    statistics,  # Statistics, its cuts and kept masses written
    target,  # TargetView
    draft,  # DraftView
    BLOCK: tl.constexpr,  # tokens read at once
    DEPENDENT: tl.constexpr,
):
    wait_for_launch_before(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1)
    request = row // target.steps
    step = row % target.steps
    if not row_is_read(target, draft, request, step):
        return
    index = row * statistics.SLOTS + slot
    source = slot_source(statistics, target, draft, request, step, slot)
    filters = slot_filters(statistics, target, draft, request, slot)
    if slot_is_filtered(statistics, target, draft, source, filters):
        cut, kept = search(statistics, target, draft, source, filters, BLOCK)
        tl.store(statistics.cuts + index, cut)
        tl.store(statistics.kept + index, kept)
    else:
        tl.store(statistics.cuts + index, -INFINITY)
        mass = source.mass
        if statistics.WHOLE:
            mass = tl.where(slot == 0, 1.0, mass)
        tl.store(statistics.kept + index, mass)


@triton.jit
def _mixture_top_kernel(
    statistics,  # Statistics, its top plane and the most likely tokens written, where they are wanted
    target,  # TargetView
    draft,  # DraftView
    DEPENDENT: tl.constexpr,
):
    wait_for_launch_before(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    request = row // target.steps
    step = row % target.steps
    temperature = target_temperature(target, request)
    if (not top_is_wanted(statistics, temperature)) | (not row_is_read(target, draft, request, step)):
        return
    rows = tl.zeros([1], tl.int64) + row
    state, _ = target_state(statistics, target, request, rows, rows >= 0)
    index = tl.arange(0, statistics.BLOCK_COUNT)
    may_hold = blocks_with_top(statistics, state, rows)
    values = tl.zeros([statistics.BLOCK_COUNT], tl.float32) - INFINITY
    tops = tl.zeros([statistics.BLOCK_COUNT], tl.int32) + NOWHERE
    block = tl.min(tl.where(may_hold, index, NOWHERE), 0)
    while block != NOWHERE:
        tokens = tokens_of(statistics, block)
        masses = tl.zeros(tokens.shape, tl.float32)
        for part in tl.static_range(statistics.PARTS):
            logits = part_logits(target, part, request, step, tokens, tokens >= 0, -INFINITY)
            masses += part_probability(state, part, keep_part(statistics, logits, state.cuts, part))
        masses = tl.where(masses > 0, masses, -INFINITY)
        top = tl.max(masses, 0)
        values = tl.where(index == block, top, values)
        tops = tl.where(index == block, first_of(masses, top, tokens), tops)
        block = tl.min(tl.where(may_hold & (index > block), index, NOWHERE), 0)
    there = index < statistics.blocks
    plane = (row * statistics.PLANES + statistics.TOP_PLANE) * statistics.blocks
    tl.store(statistics.numbers + plane + index, values, mask=there)
    tl.store(statistics.marks + (row * 2 + 1) * statistics.blocks + index, tops, mask=there)


@triton.jit
def _target_logprobs_kernel(
    logprobs_ptr,  # float32 [rows, vocab], written
    statistics,  # Statistics
    target,  # TargetView
    DEPENDENT: tl.constexpr,
):
    wait_for_launch_before(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    request = row // target.steps
    step = row % target.steps
    tokens = tokens_of(statistics, block)
    rows = tl.zeros([1], tl.int64) + row
    state, _ = target_state(statistics, target, request, rows, rows >= 0)
    used = (tokens < target.vocab) & everywhere(target_is_valid(target, request), tokens)
    logprobs = log_probability(statistics, target, state, request, step, tokens, used, tl.float32)
    if statistics.TOP_PLANE >= 0:
        most_likely = used & (tokens == top_tokens(statistics, rows, rows >= 0))
        greedy = target_temperature(target, request) == 0
        logprobs = tl.where(greedy, tl.where(most_likely, 0.0, -INFINITY), logprobs)
    tl.store(logprobs_ptr + row * target.vocab + tokens, logprobs, mask=tokens < target.vocab)


def statistics_launches(statistics: Statistics, target: TargetView, draft: DraftView) -> Iterator[Launch]:
    """What fills the statistics: the first reads each needed logit once, the others only where they must."""
    grid = (batch_of(target) * target.steps, statistics.blocks)
    arguments = {"statistics": statistics, "target": target, "draft": draft}
    if target.edits is not None:
        yield edit_launch(target.edits)
    if target.log_plausibility is not None:
        yield Launch(_plausible_kernel, grid, arguments, BLOCK_WARPS)
    yield _statistics_launch(statistics, target, draft)
    if statistics.cuts is not None:
        yield filter_launch(statistics, target, draft)
    if statistics.TOP_PLANE.value > 0:
        yield Launch(_mixture_top_kernel, grid[:1], arguments, BLOCK_WARPS, BLOCK_REGISTERS)


def _statistics_launch(statistics: Statistics, target: TargetView, draft: DraftView) -> Launch:
    """Of half precision, few threads hold a block: what each does for itself costs as much as 20 tokens do."""
    grid = (batch_of(target) * target.steps, statistics.blocks)
    arguments = {"statistics": statistics, "target": target, "draft": draft}
    read = [*target.logits, *([draft.logits] if draft.logits is not None else [])]
    if target.edits is not None:
        return Launch(_statistics_kernel, grid, arguments, BLOCK_WARPS, BLOCK_REGISTERS)
    processed = target.mask is not None or not target.MIXTURE.value
    if processed or len(read) > MOST_HALVES or any(logits.element_size() > 2 for logits in read):
        limit = BLOCK_REGISTERS if mixes_many(target) else None
        return Launch(_statistics_kernel, grid, arguments, BLOCK_WARPS, limit)
    limit = HALF_REGISTERS if statistics.cuts is None else None  # the maxima of groups take more
    return Launch(_statistics_kernel, grid, arguments, HALF_WARPS, limit)


def filter_launch(statistics: Statistics, target: TargetView, draft: DraftView) -> Launch:
    """The search for what filters keep: a program for each row and slot, which reads the groups that it lists."""
    arguments = {
        "statistics": statistics,
        "target": target,
        "draft": draft,
        "BLOCK": min(SEARCH_BLOCK.value, statistics.BLOCK_VOCAB.value),
    }
    return Launch(_filter_kernel, tuple(statistics.cuts.shape), arguments, FILTER_WARPS)


def launches(logprobs: Tensor, target: TargetView) -> Iterator[Launch]:
    """Two launches: one for the statistics, one for the log-probabilities; plausibility and greedy mixtures add one."""
    statistics = new_statistics(target, DraftView())
    yield from statistics_launches(statistics, target, DraftView())
    grid = (logprobs.shape[0] * logprobs.shape[1], statistics.blocks)
    arguments = {"logprobs_ptr": logprobs, "statistics": statistics, "target": target}
    yield Launch(_target_logprobs_kernel, grid, arguments, BLOCK_WARPS)


def launch(
    member_logits: list[Tensor],
    *,
    draft_tokens: Tensor | None = None,
    out: list[Tensor] | None = None,
    **options: Any,
) -> Tensor:
    """float32 [batch, steps, vocab]. out: where to."""
    arguments = target_of(member_logits, options)
    drafts = None if draft_tokens is None else draft_tokens.contiguous()
    target = target_view(ready_for_kernels(arguments), arguments.member_logits[0].shape[1], drafts)
    shape = (*target.logits[0].shape[:2], target.vocab)
    logprobs = torch.empty(shape, dtype=torch.float32, device=target.logits[0].device) if out is None else out[0]
    run(launches(logprobs, target), logprobs)
    return logprobs
