"""How a request's tree is judged on a GPU, by one program: the rules of `rules`, from the statistics of its rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from specens_kernels.ops.verify_tree.reference import LEAST_MASS_LEFT
from specens_kernels.ops.verify_tree.rules import RuleKind
from specens_kernels.ops.verify_tree.triton_k_seq import end_of_run, sequential_ratio
from specens_kernels.parts.draft import NO_DRAFTER, draft_temperature, drafter_logits, drafter_of
from specens_kernels.parts.draw import EMPTY_RESIDUAL, target_block_masses
from specens_kernels.parts.rules import SMALLEST_RESIDUAL, typical_probability
from specens_kernels.parts.sampling import INFINITY
from specens_kernels.parts.score_search import search_scores
from specens_kernels.parts.siblings import Left, draft_log, row_of, taken_away, weigh
from specens_kernels.parts.states import INVALID_DRAFT_DISTRIBUTION, drafter_state, log_probability
from specens_kernels.parts.statistics import NO_TOKEN, NOWHERE, row_marks, tokens_of, top_tokens
from specens_kernels.parts.target import everywhere, marks_of, raw_logits
from specens_kernels.parts.tree import at_row, first_row, with_children
from specens_kernels.parts.uniforms import STREAM_ACCEPT, uniforms_at

TRAVERSAL = tl.constexpr(int(RuleKind.TRAVERSAL))
TYPICAL = tl.constexpr(int(RuleKind.TYPICAL))
GUMBEL = tl.constexpr(int(RuleKind.GUMBEL))
K_SEQ = tl.constexpr(int(RuleKind.K_SEQ))
SMALLEST_DRAFT = tl.constexpr(LEAST_MASS_LEFT)


class Offer(NamedTuple):
    """A child and what it was drawn from, in a kernel."""

    drawn: Any  # whether from a distribution, else it was chosen
    source: Any  # its place among the sources
    log: Any  # of its draft probability, float64; 0 where it was chosen
    status: Any


@triton.jit
def _source_of(call, request, child):
    """The drafter of a child's token, int64 [1], and whether there is one: a member, or what is outside."""
    node = tl.zeros([1], tl.int64) + child - 1
    given = everywhere(draft_temperature(call.draft, request) > 0, node) & (node < call.draft.draft_len)
    drafter = node * 0
    if call.draft.logits is None:
        drafter = drafter_of(call.draft, request, node, given)
        given = given & (drafter != NO_DRAFTER)
    return drafter, given


@triton.jit
def _member_marks(call, row, drafter):
    """Status bits of one member's logits as a drafter, int32, read once more: statistics have those of all members."""
    marks = tl.zeros([call.drafts.BLOCK_VOCAB], tl.int32)
    for block in range(call.drafts.blocks):
        tokens = tokens_of(call.drafts, block)
        for member in tl.static_range(call.tree.SOURCES):
            used = everywhere(drafter == member, tokens)
            raw = raw_logits(call.target, member, row.request, row.row, tokens, used)
            marks |= marks_of(drafter_logits(call.target, call.draft, member, row.request, row.row, tokens, used, raw))
    return tl.reduce_or(marks, 0)


@triton.jit
def _offer(call, row, child, token):
    """A child of a row; token: int64 [1]."""
    if call.drafts.DRAFT_PLANE >= 0:
        drafter, given = _source_of(call, row.request, child)
        rows = tl.zeros([1], tl.int64) + row.request * call.target.steps + row.row
        target_marks, marks = row_marks(call.drafts, rows, given)
        if call.tree.APART:
            marks = target_marks
            if tl.max(target_marks, 0) != 0:
                marks = target_marks * 0 + _member_marks(call, row, tl.max(drafter, 0))
        drafts = drafter_state(call.drafts, call.draft, row.request, drafter, rows, marks, given)
        source = tl.max(drafter, 0)
        if call.tree.SOURCES == 1:
            source = source * 0
        log = tl.zeros([1], tl.float64) - INFINITY
        for own in tl.static_range(call.tree.SOURCES):
            if source == own:
                log = draft_log(call, row, own, drafter, token, drafts.soft)
        drawn = tl.max(drafts.soft.to(tl.int32), 0) > 0
        return Offer(drawn, source, tl.where(drawn, tl.max(log, 0), 0.0), tl.max(drafts.status, 0))
    else:
        return Offer(child < 0, child.to(tl.int64) * 0, tl.full([], 0.0, tl.float64), child * 0)


@triton.jit
def _next_source(call, row, child, following, drawn, source):
    """The source of the draft distribution whose rest the child after this one is drawn from, NO_DRAFTER for none."""
    wanted = tl.full([], NO_DRAFTER, tl.int64)
    if call.tree.WITHOUT_REPLACEMENT and call.drafts.DRAFT_PLANE >= 0:
        if call.draft.drafters is None:
            wanted = tl.where(drawn & (following < call.tree.ROWS), source, wanted)
        else:
            drafter, given = _source_of(call, row.request, tl.where(following < call.tree.ROWS, following, child))
            known = given & (drafter < call.tree.SOURCES) & everywhere(following < call.tree.ROWS, drafter)
            wanted = tl.max(tl.where(known, drafter, NO_DRAFTER), 0)
    return wanted


@triton.jit
def _refill(call, row, left, child, token, drawn, wanted):
    """`weigh` of those blocks that the rejection of a child changes: all where it was drawn from a distribution."""
    whole = drawn | (wanted >= 0)
    masses = left.masses
    if call.statistics.TARGET_SLOTS > 0:
        whole |= left.weighed == 0
    elif (left.weighed == 0) & (whole == 0):
        rows = tl.zeros([1], tl.int64) + row.request * call.target.steps + row.row
        masses = target_block_masses(call.statistics, row.state, rows)
    block = token // call.statistics.BLOCK_VOCAB
    first = tl.where(whole, 0, block)
    end = tl.where(whole, call.statistics.blocks, tl.minimum(block + 1, call.statistics.blocks))
    left = Left(left.rate, left.rates, left.since, masses, left.weighed)
    return weigh(call, row, left, first, end, child, wanted)


@triton.jit
def offer_children(call, row, alive, share, shares, marks, RULE: tl.constexpr):
    """Offer a row its children, one after the other.

    Returns the one that is accepted, which is none by the rule traversal; the share that is left to the row, and those
    of its children among `shares`; status bits of the children among `marks`; `Left`.
    """
    lanes = tl.arange(0, call.tree.ROWS)
    members = tl.arange(0, call.tree.LANES)
    rate = tl.full([], 1.0, tl.float64)
    rates = tl.zeros([call.tree.LANES], tl.float64)
    total = tl.full([], 1.0, tl.float64)  # the mass of what is left, in its rates
    remaining = tl.full([], 1.0, tl.float64)  # of the draft distribution without the siblings' tokens
    masses = tl.zeros([call.statistics.BLOCK_COUNT], tl.float64)
    since = tl.full([], 0, tl.int32)
    weighed = since
    accepted = since + call.tree.ROWS
    begin = since  # of the children that are tested alike; others are such a run of their own
    end = since
    ratio = tl.full([], 1.0, tl.float64)  # of a run; 0 until it is needed
    child = first_row(row.children, 0)
    while child < call.tree.ROWS:
        token = at_row(row.tokens, child)
        tokens = tl.zeros([1], tl.int64) + token
        offer = _offer(call, row, child, tokens)
        status = offer.status
        drawn = offer.drawn
        if RULE != K_SEQ:
            begin = child
        elif child >= end:
            begin = child
            end = end_of_run(call, row, child, drawn)
            ratio = tl.where(first_row(row.children, child) < end, 0.0, 1.0).to(tl.float64)
        same = tl.max(tl.where(row.children & (lanes < begin) & (row.tokens == token), lanes, 0), 0)
        scale = tl.full([], 1.0, tl.float64)
        drafted = tl.exp(offer.log)
        if call.tree.WITHOUT_REPLACEMENT:
            nothing_left = drawn & (remaining <= SMALLEST_DRAFT)
            status |= tl.where(nothing_left, INVALID_DRAFT_DISTRIBUTION, 0)
            drawn = drawn & (nothing_left == 0)
            scale = tl.where(drawn, 1.0 / tl.where(drawn, remaining, 1.0), 1.0)
            drafted = tl.where(drawn, tl.where(same > 0, 0.0, drafted * scale), 1.0)
        own = log_probability(
            call.statistics, call.target, row.state, row.request, row.row, tokens, tokens >= 0, tl.float64
        )
        own = rate * tl.max(tl.exp(own), 0) - taken_away(call, row, rates, tokens)
        own = share * tl.where(same > since, 0.0, tl.maximum(own, 0.0)) / total
        node = tokens * 0 + child - 1
        uniform = tl.max(uniforms_at(call.random, call.draft, row.request, node, node, STREAM_ACCEPT, node >= 0), 0)
        following = first_row(row.children, child)
        if RULE == K_SEQ and call.drafts.DRAFT_PLANE >= 0:
            count = tl.sum((row.children & (lanes >= begin) & (lanes < end)).to(tl.int32), 0)
            tried = uniform * drafted
            # most children need no ratio: they are accepted by the largest, or rejected by the least
            if (ratio == 0) & (tried * count >= own) & ((tried < own) | (following >= end)):
                left = Left(rate, rates, since, masses, weighed)
                ratio = sequential_ratio(call, row, left, total, begin - 1, offer.source, count)
            scale = tl.maximum(ratio, 1.0)
            drafted *= scale
        if RULE != TRAVERSAL and uniform * drafted < own:
            accepted = child
            following = accepted * 0 + call.tree.ROWS
        elif RULE != K_SEQ or following >= end:
            passed = own / tl.where(drafted > 0, drafted, 1.0)
            passed = tl.where(own > 0, tl.where(drafted > 0, tl.minimum(passed, 1.0), 1.0), 0.0)
            shares = tl.where(lanes == child, passed, shares)
            factor = tl.where(drawn, share / total, 1.0)
            rate *= factor
            rates = rates * factor + tl.where((members == offer.source) & everywhere(drawn, members), scale, 0.0)
            wanted = _next_source(call, row, child, following, drawn, offer.source)
            left = Left(rate, rates, since, masses, weighed)
            masses, remaining = _refill(call, row, left, child, token, drawn, wanted)
            after = tl.sum(masses, 0)
            mass = tl.where(drawn, after, share * after / total)
            nothing = mass <= SMALLEST_RESIDUAL
            status |= tl.where(nothing & alive, EMPTY_RESIDUAL, 0)
            rest = mass + 1 - share
            share = tl.where(rest > SMALLEST_RESIDUAL, mass / rest, 1.0)
            rate = tl.where(nothing, 1.0, rate)
            rates = tl.where(everywhere(nothing, members), 0.0, rates)
            total = tl.where(nothing, 1.0, after)
            since = tl.where(nothing, child, since)
            weighed = tl.where(nothing, 0, 1)
        marks = tl.where(lanes == child, status, marks)
        child = following
    return accepted, share, shares, marks, Left(rate, rates, since, masses, weighed)


@triton.jit
def row_status(call, row, status):
    """With the marks of a row's logits."""
    rows = tl.zeros([1], tl.int64) + row.request * call.target.steps + row.row
    marks, _ = row_marks(call.statistics, rows, rows >= 0)
    return status | tl.max(marks, 0)


@triton.jit
def walk_tree(call, request, above, tokens, RULE: tl.constexpr):
    """By the rules token and k_seq, from the root down, and traversal, from the leaves to the root.

    Returns the last accepted row, its depth, status bits of all rows and of all nodes, and what is left of that row: as
    `offer_children` does.
    """
    lanes = tl.arange(0, call.tree.ROWS)
    marks = lanes * 0
    bits = lanes * 0
    shares = tl.where(lanes == 0, 1.0, 0.0).to(tl.float64)
    kept = shares * 0
    rate = tl.full([], 1.0, tl.float64)
    rates = tl.zeros([call.tree.LANES], tl.float64)
    masses = tl.zeros([call.statistics.BLOCK_COUNT], tl.float64)
    here = tl.full([], 0, tl.int32)
    depth = here
    after = here  # the child that the traversal comes back from
    read = here - 1  # the row that was offered its children last
    since = here
    weighed = here
    enters = here + 1
    ends = here
    going = here + 1
    while going != 0:
        children = (above == with_children(call.tree, here, depth)) & (tokens >= 0)
        if enters != 0:
            row, status = row_of(call, request, here, children, tokens)
            alive = (status & NO_TOKEN) == 0
            accepted, share, shares, marks, left = offer_children(
                call, row, alive, at_row(shares, here), shares, marks, RULE
            )
            rate, rates, since, masses, weighed = left
            bits = tl.where(lanes == here, row_status(call, row, status), bits)
            kept = tl.where(lanes == here, share, kept)
            read = here
            after = tl.where(RULE == TRAVERSAL, here, accepted)
        if RULE == TRAVERSAL:
            node = tl.zeros([1], tl.int64) + here - 1
            uniform = tl.max(uniforms_at(call.random, call.draft, request, node, node, STREAM_ACCEPT, node >= 0), 0)
            child = first_row(children & (shares > 0), after)
            descends = (child < call.tree.ROWS) & (ends == 0)
            stays = (descends == 0) & ((here == 0) | (uniform < at_row(kept, here)) | (ends != 0))
            going = tl.where(stays & (read == here), 0, 1)
            ends = tl.where(stays, 1, 0)
            enters = tl.where(descends | stays, 1, 0)
            after = tl.where(descends, child, here)
            depth = tl.where(descends, depth + 1, tl.where(stays, depth, depth - 1))
            here = tl.where(descends, child, tl.where(stays, here, at_row(above, here)))
        else:
            going = tl.where(after < call.tree.ROWS, 1, 0)
            here = tl.where(going != 0, after, here)
            shares = tl.where(lanes == here, 1.0, shares)
            depth += going
    return here, depth, bits, marks, Left(rate, rates, since, masses, weighed)


@triton.jit
def find_longest(call, request, above, tokens, greedy, first_position, RULE: tl.constexpr):
    """The longest path all of whose nodes pass: the most likely tokens, those of the best scores, or likely enough.

    Returns its last row, the first of several, its depth, status bits of all rows, and their one next token.
    """
    lanes = tl.arange(0, call.tree.ROWS)
    bits = lanes * 0
    depths = tl.where(lanes == 0, 0, -1)
    picked = lanes * 0 - 1
    here = tl.full([], 0, tl.int32)
    while here < call.tree.ROWS:
        depth = at_row(depths, here)
        children = (above == with_children(call.tree, here, depth)) & (tokens >= 0)
        if RULE == GUMBEL:
            best, chosen, status = search_scores(
                call.scores, call.statistics, call.target, request, here.to(tl.int64), first_position + depth, 1, 1
            )
            top = tl.max(tl.where(best > -INFINITY, chosen, -1), 0)
            passes = children & (tokens == top)
        else:
            row, status = row_of(call, request, here, children, tokens)
            status = row_status(call, row, status)
            rows = tl.zeros([1], tl.int64) + request * call.target.steps + row.row
            top = here * 0 - 1
            if call.statistics.TOP_PLANE >= 0:
                top = tl.max(top_tokens(call.statistics, rows, everywhere(greedy, rows)), 0)
                top = tl.where(top == NOWHERE, -1, top)
            passes = children & (tokens == top)
            if RULE == TYPICAL and call.rule.sums is not None:
                steps = rows * 0 + row.row
                judged = everywhere(greedy == 0, steps) & (steps < call.draft.draft_len)
                limit = tl.max(typical_probability(call.rule, call.statistics, call.draft, request, steps, judged), 0)
                logs = log_probability(
                    call.statistics, call.target, row.state, request, row.row, tokens, children, tl.float64
                )
                passes = tl.where(everywhere(greedy, lanes), passes, children & (tl.exp(logs) > limit))
        bits = tl.where(lanes == here, status, bits)
        picked = tl.where(lanes == here, top, picked)
        depths = tl.where(passes, depth + 1, depths)
        here = first_row(depths >= 0, here)
    depth = tl.max(depths, 0)
    last = first_row(depths == depth, -1)
    return last, depth, bits, at_row(picked, last)
