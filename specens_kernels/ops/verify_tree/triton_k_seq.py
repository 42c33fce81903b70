"""The rule k_seq on a GPU: the siblings that are tested alike, and the ratio by which they are; see `rules`."""

from __future__ import annotations

import triton
import triton.language as tl

from specens_kernels.parts.draft import draft_temperature, drafter_of
from specens_kernels.parts.siblings import left_of_block
from specens_kernels.parts.states import block_is_cut
from specens_kernels.parts.target import everywhere
from specens_kernels.parts.tree import at_row, first_row

RATIOS = tl.constexpr(4)  # weighed by one pass over the row
TRIED = tl.constexpr(256)  # between two of them at once, without a pass
CLOSE = tl.constexpr(2.0**-23)  # ends of a bracket, relative: what sums in float32 tell apart
LEAST_POWER = tl.constexpr(1e-300)


@triton.jit
def end_of_run(call, row, child, drawn):
    """The first child after those, from this one on, that its drafter drew one after the other, int32."""
    lanes = tl.arange(0, call.tree.ROWS)
    others = row.children & everywhere(drawn == 0, lanes)
    if call.draft.drafters is not None:
        node = lanes.to(tl.int64) - 1
        there = row.children & everywhere(draft_temperature(call.draft, row.request) > 0, lanes)
        drafters = drafter_of(call.draft, row.request, node, there)
        others |= row.children & (drafters != at_row(drafters, child))
    return first_row(others, child)


@triton.jit
def sequential_ratio(call, row, left, total, last, source, count):
    """The ratio by which `count` drafts of a source are tested, float64; from 1 to that number.

    total: the mass of what is left, by children up to `last`. A few ratios are weighed by one pass over the row. What
    is left is convex in the ratio: below the line between two of them, above those that touch it there. So the root
    lies between theirs, and passes narrow the bracket more than they cut it, which is by RATIOS - 1 at least.
    """
    low = tl.full([], 1.0, tl.float64)
    high = low * count
    index = tl.arange(0, RATIOS)
    while high - low > low * CLOSE:
        between = (high - low) / (RATIOS - 1)
        ratios = low + between * index
        masses, drafted = _weigh_ratios(call, row, left, total, last, source, low, between)
        short = tl.sum((_suffices(masses, ratios, count) == 0).to(tl.int32), 0)
        after = tl.minimum(tl.maximum(short, 1), RATIOS - 1)
        begin = at_row(ratios, after - 1)
        end = at_row(ratios, after)
        of_begin = at_row(masses, after - 1)
        of_end = at_row(masses, after)
        slope = (of_begin - of_end) / (end - begin)
        least, _ = _first_sufficient(
            begin, end, of_begin, of_end, at_row(drafted, after - 1), at_row(drafted, after), count
        )
        _, most = _first_sufficient(begin, end, of_begin, of_end, slope, slope, count)
        low = tl.where(short == 0, low, tl.where(short == RATIOS, high, least))
        high = tl.where(short == 0, low, tl.where(short == RATIOS, high, most))
    return high


@triton.jit
def _weigh_ratios(call, row, left, total, last, source, least, between):
    """What is left of a row without ratio * draft, and the draft's mass where anything is; float64 [RATIOS]."""
    index = tl.arange(0, RATIOS)
    masses = tl.zeros([RATIOS], tl.float64)
    drafted = tl.zeros([RATIOS], tl.float64)
    rate = (1.0 / total).to(tl.float32)
    for block in range(0, call.statistics.blocks):
        if block_is_cut(call.statistics, row.request * call.target.steps + row.row, block) == 0:
            of_block = left_of_block(call, row, left, block, last, source)
            for own in range(RATIOS):
                rest = of_block.rest * rate - of_block.draft * (least + between * own).to(tl.float32)
                mass = tl.sum(tl.maximum(rest, 0.0), 0).to(tl.float64)
                draft = tl.sum(tl.where(rest > 0, of_block.draft, 0.0), 0).to(tl.float64)
                masses += tl.where(index == own, mass, 0.0)
                drafted += tl.where(index == own, draft, 0.0)
    return masses, drafted


@triton.jit
def _suffices(left, ratio, count):
    """Whether no token is accepted too often: what is left of the target is no more than the chance that all tests
    fail."""
    rejected = 1.0 - (1.0 - left) / ratio  # by one of them
    return left <= tl.exp(count * tl.log(tl.maximum(rejected, LEAST_POWER)))


@triton.jit
def _first_sufficient(begin, end, of_begin, of_end, slope_of_begin, slope_of_end, count):
    """Between which two ratios the first one that suffices lies, if the larger of two falling lines is left."""
    low = begin
    width = end - begin
    for _ in tl.static_range(2):
        width = width / TRIED
        ratio = low + width * (1 + tl.arange(0, TRIED)).to(tl.float64)
        left = tl.maximum(of_begin - slope_of_begin * (ratio - begin), of_end + slope_of_end * (end - ratio))
        short = tl.sum((_suffices(tl.maximum(left, 0.0), ratio, count) == 0).to(tl.int32), 0)
        low += width * tl.minimum(short, TRIED - 1)
    return low, low + width
