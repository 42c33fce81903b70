"""A request's draft tree in registers: a lane a row, the position after the committed text first, then that after each
node. A row's token is that of its node."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from specens_kernels.parts.draft import DraftView
from specens_kernels.parts.statistics import greedy_only
from specens_kernels.parts.target import TargetView

NO_ROW = tl.constexpr(-1)  # above the first row, and above what is padding
TOO_DEEP = tl.constexpr(-2)  # the row of which nodes after the last level are children


class TreeView(NamedTuple):
    """The trees of a batch, beside the draft's tokens and parents."""

    levels: int  # the most nodes of a path
    WITHOUT_REPLACEMENT: tl.constexpr
    ROWS: tl.constexpr  # the power of two from their number
    SOURCES: tl.constexpr  # the members that may have drafted, 1 where one did or the drafts are from outside
    LANES: tl.constexpr  # the power of two from the sources
    APART: tl.constexpr  # their distributions have statistics of their own
    ALL_GREEDY: tl.constexpr


def tree_view(target: TargetView, draft: DraftView, levels: int, without_replacement: bool, apart: bool) -> TreeView:
    """From an operator's arguments. apart: whether draft distributions have statistics of their own."""
    sources = 1 if draft.drafters is None else len(target.logits)
    return TreeView(
        levels=levels,
        WITHOUT_REPLACEMENT=tl.constexpr(without_replacement),
        ROWS=tl.constexpr(triton.next_power_of_2(target.steps)),
        SOURCES=tl.constexpr(sources),
        LANES=tl.constexpr(triton.next_power_of_2(sources)),
        APART=tl.constexpr(apart),
        ALL_GREEDY=tl.constexpr(greedy_only(target)),
    )


@triton.jit
def load_tree(tree, target, draft, request, length):
    """The row above each, NO_ROW where there is none, and its token, -1 where it has none; int32 [ROWS]."""
    row = tl.arange(0, tree.ROWS)
    used = (row > 0) & (row <= length)
    parent = tl.load(draft.parents + request * draft.draft_len + row - 1, mask=used, other=NO_ROW - 1)
    above = tl.where(used & (parent >= -1) & (parent < row - 1), parent + 1, NO_ROW).to(tl.int32)
    tokens_ptr = draft.tokens + request * draft.tokens_stride_batch
    token = tl.load(tokens_ptr + (row.to(tl.int64) - 1) * draft.tokens_stride_step, mask=used, other=-1)
    known = (token >= 0) & (token < tl.maximum(target.vocab, draft.vocab))
    return above, tl.where(known, token, -1).to(tl.int32)


@triton.jit
def at_row(values, row):
    """That of one row, a scalar; 0 where it is not there."""
    return tl.sum(tl.where(tl.arange(0, values.shape[0]) == row, values, 0), 0)


@triton.jit
def first_row(marked, after):
    """The first marked row after one, int32; as many as lanes where there is none."""
    row = tl.arange(0, marked.shape[0])
    return tl.min(tl.where(marked & (row > after), row, marked.shape[0]), 0)


@triton.jit
def with_children(tree, row, depth):
    """The row whose children are judged: it, or TOO_DEEP where they are padding."""
    return tl.where(depth < tree.levels, row, TOO_DEEP)
