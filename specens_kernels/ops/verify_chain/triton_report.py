"""What is told of emitted tokens beside their target log-probability, on a GPU: a pass over their rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specens_kernels.arguments import NO_LOGPROBS, RAW_LOGPROBS, Report, Target
from specens_kernels.ops.target_logprobs.reference import raw
from specens_kernels.ops.target_logprobs.triton_kernel import BLOCK_REGISTERS, BLOCK_WARPS, statistics_launches
from specens_kernels.parts.draft import DraftView
from specens_kernels.parts.launches import Launch, wait_for_launch_before
from specens_kernels.parts.sampling import INFINITY
from specens_kernels.parts.states import keep_part, log_power, log_probability, target_state
from specens_kernels.parts.statistics import NOWHERE, Statistics, first_of, load_plane, new_statistics, tokens_of
from specens_kernels.parts.target import LN_2, TargetView, target_temperature, target_view

SLACK = tl.constexpr(1e-4)  # of a bound, wider than what float32 rounds


class ReportView(NamedTuple):
    """What is written of each column of `tokens`; None where it is not asked for."""

    tokens: Tensor  # int64 [batch, columns], those emitted, -1 for none
    columns: int
    logprobs: Tensor | None  # float32 [batch, columns], of the emitted tokens
    top_tokens: Tensor | None  # int64 [batch, columns, top], most likely first, the lowest on a tie
    top_logprobs: Tensor | None  # float32 [batch, columns, top]
    top: int
    path: Tensor | None = None  # int64 [batch, columns - 1] of trees: column i + 1 was drawn at the row after this node


@triton.jit
def _next_best(statistics, target, state, request, step, block, value, token):
    """The most likely token of a block after one of that log-probability; its log-probability first.

    -inf and NOWHERE where there is none.
    """
    tokens = tokens_of(statistics, block)
    used = tokens < target.vocab
    logprobs = log_probability(statistics, target, state, request, step, tokens, used, tl.float32)
    after = used & ((logprobs < value) | ((logprobs == value) & (tokens > token)))
    logprobs = tl.where(after, logprobs, -INFINITY)
    best = tl.max(logprobs, 0)
    return best, first_of(logprobs, best, tokens)


@triton.jit
def _block_bounds(statistics, target, state, request, rows):
    """What no token's log-probability exceeds in each block of one row, float32 [BLOCK_COUNT]."""
    temperature = target_temperature(target, request)
    bounds = tl.zeros([1, statistics.BLOCK_COUNT], tl.float32) - INFINITY
    for part in tl.static_range(statistics.PARTS):
        largest = keep_part(statistics, load_plane(statistics, rows, part, rows >= 0, -INFINITY), state.cuts, part)
        power = log_power(largest, state.maxima[part][:, None], state.offsets[part][:, None], temperature, tl.float32)
        bounds = tl.maximum(bounds, power)
    bounds += tl.where(bounds > -INFINITY, statistics.PARTS * LN_2 + SLACK * (1 + tl.abs(bounds)), 0.0)
    if statistics.WHOLE:
        bounds -= tl.log(state.cuts[1]).to(tl.float32)[:, None]
    return tl.reshape(bounds, [statistics.BLOCK_COUNT])


@triton.jit
def _write_top(report, statistics, target, state, request, step, rows, position):
    """Keep the best token not written yet of each block that can have the next one, and write the best of these."""
    index = tl.arange(0, statistics.BLOCK_COUNT)
    bounds = _block_bounds(statistics, target, state, request, rows)  # of blocks that are not read yet
    values = tl.zeros([statistics.BLOCK_COUNT], tl.float32) - INFINITY
    tokens = tl.zeros([statistics.BLOCK_COUNT], tl.int32) + NOWHERE
    for rank in range(report.top):
        bound = tl.max(bounds, 0)
        while (bound > -INFINITY) & (bound >= tl.max(values, 0)):
            block = tl.min(tl.where(bounds == bound, index, NOWHERE), 0)
            best, token = _next_best(statistics, target, state, request, step, block, INFINITY, -1)
            values = tl.where(index == block, best, values)
            tokens = tl.where(index == block, token, tokens)
            bounds = tl.where(index == block, -INFINITY, bounds)
            bound = tl.max(bounds, 0)
        best = tl.max(values, 0)
        token = first_of(values, best, tokens)
        tl.store(report.top_logprobs + position * report.top + rank, best)
        tl.store(report.top_tokens + position * report.top + rank, tl.where(token == NOWHERE, -1, token))
        if token != NOWHERE:
            block = token // statistics.BLOCK_VOCAB
            best, token = _next_best(statistics, target, state, request, step, block, best, token)
            values = tl.where(index == block, best, values)
            tokens = tl.where(index == block, token, tokens)


@triton.jit
def _report_kernel(
    report,  # ReportView, written
    statistics,  # Statistics
    target,  # TargetView
    DEPENDENT: tl.constexpr,
):
    wait_for_launch_before(DEPENDENT)
    index = tl.program_id(0).to(tl.int64)
    request = index // report.columns
    step = index % report.columns
    token = tl.load(report.tokens + index)
    if report.path is not None:
        step = tl.load(report.path + request * (report.columns - 1) + step - 1, mask=step > 0, other=-1) + 1
    if token < 0:
        if report.logprobs is not None:
            tl.store(report.logprobs + index, 0.0)
        if report.top_tokens is not None:
            for rank in range(report.top):
                tl.store(report.top_logprobs + index * report.top + rank, -INFINITY)
                tl.store(report.top_tokens + index * report.top + rank, -1)
        return
    rows = tl.zeros([1], tl.int64) + request * target.steps + step
    state, _ = target_state(statistics, target, request, rows, rows >= 0)
    if report.logprobs is not None:
        tokens = (rows & 0) + token
        own = log_probability(statistics, target, state, request, step, tokens, tokens >= 0, tl.float64)
        tl.store(report.logprobs + index, tl.max(own, 0).to(tl.float32))
    if report.top_tokens is not None:
        _write_top(report, statistics, target, state, request, step, rows, index)


def new_results(batch: int, columns: int, report: Report, device: torch.device) -> list[Tensor]:
    """Unwritten results in the order in which operators return or take them; see `Verdict`."""
    shape = (batch, columns)
    sizes = [(shape, torch.int64), *[((batch,), torch.int64)] * 3, ((batch,), torch.int32)]
    if report.logprobs != NO_LOGPROBS:
        sizes.append((shape, torch.float32))
    if report.top > 0:
        sizes += [((*shape, report.top), torch.int64), ((*shape, report.top), torch.float32)]
    return [torch.empty(size, dtype=dtype, device=device) for size, dtype in sizes]


def report_launches(report: ReportView, statistics: Statistics, target: TargetView) -> Iterator[Launch]:
    """A program for each column. statistics: of the rows of emitted tokens."""
    grid = (report.tokens.shape[0] * report.columns,)
    arguments = {"report": report, "statistics": statistics, "target": target}
    yield Launch(_report_kernel, grid, arguments, BLOCK_WARPS, BLOCK_REGISTERS)


def raw_report_launches(report: ReportView, target: TargetView, emitted: DraftView) -> Iterator[Launch]:
    """The same of another target, whose rows are read first where a token was emitted: those that `emitted` has."""
    statistics = new_statistics(target, DraftView())
    yield from statistics_launches(statistics, target, emitted)
    yield from report_launches(report, statistics, target)


def emitted_rows(target: TargetView, num_tokens: Tensor) -> DraftView:
    """The first num_tokens rows, int64 [batch]."""
    return DraftView(draft_len=target.steps, lens=num_tokens)


def raw_view(target: Target, report: Report, steps: int) -> TargetView | None:
    """The target without temperature, filters and processing, if it is that which log-probabilities are asked of."""
    return target_view(raw(target), steps) if report.logprobs == RAW_LOGPROBS else None
