"""What is left of a row's target when its children were rejected, on a GPU.

That is max(rate * target - the sum of rates[source] * the source's draft distribution, 0), without the tokens of
rejected children, over its sum: what a child takes away is part of what the one before it left, so that the maxima fold
into one. A rejected child's token has nothing left, unless the child's share is 1, when what is left does not matter.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from specens_kernels.parts.chain import draft_log_probability
from specens_kernels.parts.draft import NO_DRAFTER, DraftView, drafter_logits
from specens_kernels.parts.draw import RowStates, block_probabilities, choose_block, first_exceeding
from specens_kernels.parts.rules import RuleView
from specens_kernels.parts.sampling import INFINITY
from specens_kernels.parts.scores import ScoreView
from specens_kernels.parts.states import DraftState, block_is_cut, drafter_state, no_draft_state, target_state
from specens_kernels.parts.statistics import NO_SLOT, Statistics, first_of, tokens_of
from specens_kernels.parts.target import TargetView, clean, raw_logits
from specens_kernels.parts.tree import TreeView, at_row, first_row
from specens_kernels.parts.uniforms import RandomView


class TreeCall(NamedTuple):
    """What a batch of trees is judged by."""

    tree: TreeView
    target: TargetView
    statistics: Statistics
    draft: DraftView
    drafts: Statistics  # of the draft distributions: the target's, unless several members drafted otherwise
    random: RandomView
    rule: RuleView
    scores: ScoreView | None  # of the rule gumbel


class Row(NamedTuple):
    """A row of a request in a kernel, and the children that are offered to it."""

    request: Any
    row: Any  # int64
    state: Any  # as `target_state` gives it
    sources: Any  # as `drafter_state` gives them, a tuple
    children: Any  # bool [ROWS]
    tokens: Any  # int32 [ROWS], of the tree


class Left(NamedTuple):
    """What rejected children leave, in a kernel."""

    rate: Any  # float64
    rates: Any  # float64 [LANES]
    since: Any  # int32: the children after this row have nothing left
    masses: Any  # float64 [BLOCK_COUNT]
    weighed: Any  # int32: whether the masses are known


class BlockLeft(NamedTuple):
    """What is left of a block's tokens, in a kernel; float32."""

    rest: Any
    target: Any  # probabilities
    draft: Any  # those of the draft that is looked at, but for the tokens of children


@triton.jit
def _source_state(call, request, row, source):
    """The DraftState of one row, as `drafter_state` gives it."""
    rows = tl.zeros([1], tl.int64) + request * call.target.steps + row
    drafter = rows * 0 + source
    if call.tree.SOURCES == 1:
        drafter = rows * 0 + call.draft.drafter
    return drafter_state(call.drafts, call.draft, request, drafter, rows, (rows * 0).to(tl.int32), rows >= 0).state


@triton.jit
def row_of(call, request, row, children, tokens):
    """A row, int32, with the states of its distributions; and its status, int32."""
    row = row.to(tl.int64)
    rows = tl.zeros([1], tl.int64) + request * call.target.steps + row
    state, status = target_state(call.statistics, call.target, request, rows, rows >= 0)
    sources = ()
    if call.drafts.DRAFT_PLANE >= 0:
        for source in tl.static_range(call.tree.SOURCES):
            sources += (_source_state(call, request, row, source),)
    return Row(request, row, state, sources, children, tokens), tl.max(status, 0)


@triton.jit
def source_state(row, source: tl.constexpr):
    """The DraftState of a source. Up to Triton 3.6 its fields have lost their names where it was added to a tuple."""
    maximum, offset, scale, cut = row.sources[source]
    return DraftState(maximum, offset, scale, cut)


@triton.jit
def draft_log(call, row, source: tl.constexpr, drafter, token, used):
    """Log of a source's draft probability of a token, int64 [1]; float64 [1]."""
    state = source_state(row, source)
    return draft_log_probability(
        call.drafts, call.target, call.draft, state, drafter, row.request, row.row, token, used
    )


@triton.jit
def taken_away(call, row, rates, token):
    """The sum of rates[source] * draft probability of a token, int64 [1]; float64."""
    total = tl.full([], 0.0, tl.float64)
    if call.drafts.DRAFT_PLANE >= 0:
        for source in tl.static_range(call.tree.SOURCES):
            rate = at_row(rates, source)
            if rate > 0:
                drafter = token * 0 + source
                if call.tree.SOURCES == 1:
                    drafter = token * 0 + call.draft.drafter
                total += rate * tl.max(tl.exp(draft_log(call, row, source, drafter, token, token >= 0)), 0)
    return total


@triton.jit
def _member_probabilities(call, row, member: tl.constexpr, tokens):
    """A member's own as a drafter, float32."""
    state = source_state(row, member)
    logits = raw_logits(call.target, member, row.request, row.row, tokens, tokens >= 0)
    logits = drafter_logits(call.target, call.draft, member, row.request, row.row, tokens, tokens >= 0, logits)
    logits = clean(logits)
    if call.drafts.DRAFT_SLOT != NO_SLOT:
        logits = tl.where(logits >= state.cut, logits, -INFINITY)
    return tl.exp2(tl.fma(logits - state.maximum, state.scale, state.offset.to(tl.float32)))


@triton.jit
def _one_source(call, row, left, tokens, wanted):
    """The target's probabilities, the draft's, and what the draft leaves of the target; float32."""
    subtracts = (tl.max(left.rates, 0) > 0) | (wanted >= 0)
    drafter = tl.full([], 0, tl.int32) + call.draft.drafter
    own_state = no_draft_state()
    if call.drafts.DRAFT_PLANE >= 0:
        own_state = source_state(row, 0)
    states = RowStates(row.state, own_state, drafter)
    probabilities, drafted = block_probabilities(
        call.statistics, call.target, call.draft, states, row.request, row.row, tokens, subtracts, True
    )
    rest = probabilities * left.rate.to(tl.float32) - drafted * at_row(left.rates, 0).to(tl.float32)
    return probabilities, drafted, rest


@triton.jit
def _several_sources(call, row, left, tokens, wanted):
    """The same, where the draft is that of the member `wanted`."""
    states = RowStates(row.state, source_state(row, 0), NO_DRAFTER)
    probabilities, _ = block_probabilities(
        call.statistics, call.target, call.draft, states, row.request, row.row, tokens, wanted < NO_DRAFTER
    )
    drafted = tl.zeros(tokens.shape, tl.float32)
    rest = probabilities * left.rate.to(tl.float32)
    for source in tl.static_range(call.tree.SOURCES):
        rate = at_row(left.rates, source).to(tl.float32)
        if (rate > 0) | (wanted == source):
            own = _member_probabilities(call, row, source, tokens)
            rest -= own * rate
            if wanted == source:
                drafted = own
    return probabilities, drafted, rest


@triton.jit
def left_of_block(call, row, left, block, last, wanted):
    """The BlockLeft of a block, with the draft `wanted` and the children up to `last`."""
    tokens = tokens_of(call.statistics, block)
    if call.tree.SOURCES == 1:
        probabilities, drafted, rest = _one_source(call, row, left, tokens, wanted)
    else:
        probabilities, drafted, rest = _several_sources(call, row, left, tokens, wanted)
    rest = tl.maximum(rest, 0.0)
    lanes = tl.arange(0, call.tree.ROWS)
    here = row.children & (lanes <= last) & (row.tokens // call.statistics.BLOCK_VOCAB == block)
    child = first_row(here, 0)
    while child < call.tree.ROWS:
        token = at_row(row.tokens, child)
        drafted = tl.where(tokens == token, 0.0, drafted)
        rest = tl.where(tokens == tl.where(child > left.since, token, -1), 0.0, rest)
        child = first_row(here, child)
    return BlockLeft(rest, probabilities, drafted)


@triton.jit
def weigh(call, row, left, first, end, last, wanted):
    """Masses of what children up to `last` leave, float64 [BLOCK_COUNT], those of some blocks anew; and the mass of the
    draft `wanted`, a source or none, in these blocks without their tokens."""
    index = tl.arange(0, call.statistics.BLOCK_COUNT)
    masses = left.masses
    drafted_mass = tl.full([], 0.0, tl.float64)
    for block in range(first, end):
        mass = tl.full([], 0.0, tl.float32)
        cut = block_is_cut(call.statistics, row.request * call.target.steps + row.row, block)
        if (wanted >= 0) | (cut == 0):
            of_block = left_of_block(call, row, left, block, last, wanted)
            mass = tl.sum(of_block.rest, 0)
            drafted_mass += tl.sum(of_block.draft, 0).to(tl.float64)
        masses = tl.where(index == block, mass.to(tl.float64), masses)
    return masses, drafted_mass


@triton.jit
def draw_left(call, row, left, masses, uniform):
    """A token of what all children leave, int32, by its masses, which are known."""
    block, amount = choose_block(masses, uniform * tl.sum(masses, 0))
    of_block = left_of_block(call, row, left, block, call.tree.ROWS, NO_DRAFTER)
    tokens = tokens_of(call.statistics, block)
    likely = first_of(of_block.target, tl.max(of_block.target, 0), tokens)
    token = first_exceeding(of_block.rest.to(tl.float64), amount, tokens)
    return tl.where(token >= 0, token, likely)
