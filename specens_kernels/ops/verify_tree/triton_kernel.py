"""Tree verification on a GPU: a pass over the logits, and a program a request that judges its tree and draws.

The program reads statistics and the logits of draft tokens, a row once more for each rejected child that was drawn from
a distribution, and a block for each that was chosen. Filters and the rule typical add a launch, and filters the row
that the next token is drawn from. Several drafters whose distributions are no parts of the target add a second pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specens_kernels.arguments import (
    NO_LOGPROBS,
    Report,
    Rule,
    Tree,
    TreeArguments,
    ready_for_kernels,
)
from specens_kernels.ops.sample.triton_scores import SEARCH_REGISTERS, SEARCH_WARPS, pass_launches
from specens_kernels.ops.target_logprobs.triton_kernel import statistics_launches
from specens_kernels.ops.verify_chain.triton_report import (
    ReportView,
    raw_report_launches,
    raw_view,
    report_launches,
)
from specens_kernels.ops.verify_chain.triton_rules import rule_launches
from specens_kernels.ops.verify_tree.reference import empty_verdict
from specens_kernels.ops.verify_tree.triton_walk import GUMBEL, TYPICAL, find_longest, walk_tree
from specens_kernels.parts.chain import INVALID_DRAFT_TOKEN, INVALID_PARAMETER, request_is_valid
from specens_kernels.parts.draft import NO_DRAFTER, DraftView, chain_len, dense_drafts, draft_view, without_distribution
from specens_kernels.parts.draw import EMPTY_RESIDUAL, target_block_masses
from specens_kernels.parts.launches import Launch, run, wait_for_launch_before
from specens_kernels.parts.rules import new_rule
from specens_kernels.parts.scores import score_view
from specens_kernels.parts.siblings import Left, TreeCall, draw_left, row_of, weigh
from specens_kernels.parts.statistics import NO_TOKEN, has_draft_distribution, new_statistics
from specens_kernels.parts.target import TargetView, batch_of, target_temperature, target_view
from specens_kernels.parts.tree import at_row, load_tree, tree_view, with_children
from specens_kernels.parts.uniforms import RandomView, uniforms_at
from specens_kernels.rules import RuleKind

STREAM_NEXT = tl.constexpr(1)
WARPS = 8  # a block of 4096 tokens is loaded at once; with more, what several members need does not fit in registers
VALIDATED = 32  # uniforms looked at together


class Found(NamedTuple):
    """What is written; the fields of a Verdict."""

    tokens: Tensor  # int64 [batch, levels + 1]
    num_accepted: Tensor  # int64 [batch]
    num_tokens: Tensor  # int64 [batch]
    next_token: Tensor  # int64 [batch]
    status: Tensor  # int32 [batch]
    path: Tensor  # int64 [batch, levels]
    COLUMNS: tl.constexpr  # the power of two from levels + 1


@triton.jit
def _draw(call, request, last, depth, tokens, children, left):
    """The token after the path, by what is left of its last row."""
    row, _ = row_of(call, request, last, children, tokens)
    masses = left.masses
    if call.statistics.TARGET_SLOTS > 0:
        if left.weighed == 0:
            masses = weigh(call, row, left, 0, call.statistics.blocks, call.tree.ROWS, NO_DRAFTER)[0]
    elif left.weighed == 0:
        rows = tl.zeros([1], tl.int64) + request * call.target.steps + row.row
        masses = target_block_masses(call.statistics, row.state, rows)
    step = tl.zeros([1], tl.int64) + depth
    uniform = uniforms_at(call.random, call.draft, request, call.draft.draft_len, step, STREAM_NEXT, step >= 0)
    return draw_left(call, row, left, masses, tl.max(uniform, 0))


@triton.jit
def _write_path(found, call, request, last, depth, above, tokens, bits, marks):
    """Write the path to a row and its tokens. Returns the status of its rows, and of the children that were looked at:
    up to the accepted one, all of the last row."""
    lanes = tl.arange(0, call.tree.ROWS)
    status = tl.full([], 0, tl.int32)
    here = last
    level = depth
    accepted = last * 0 + call.tree.ROWS
    while here >= 0:
        status |= at_row(bits, here)
        children = (above == with_children(call.tree, here, level)) & (lanes <= accepted)
        own = tl.where(lanes == accepted, marks & ~EMPTY_RESIDUAL, marks)
        own = tl.where(tokens >= 0, own, INVALID_DRAFT_TOKEN)
        status |= tl.reduce_or(tl.where(children, own, 0), 0)
        if here > 0:
            token = at_row(tokens, here)
            tl.store(found.tokens + request * (call.tree.levels + 1) + level - 1, token.to(tl.int64))
            tl.store(found.path + request * call.tree.levels + level - 1, (here - 1).to(tl.int64))
        accepted = here
        here = at_row(above, here)
        level -= 1
    return status


@triton.jit
def _judge(found, call, request, length, RULE: tl.constexpr):
    """The number of accepted tokens, the next token, and the status of a valid request; all int32."""
    above, tokens = load_tree(call.tree, call.target, call.draft, request, length)
    greedy = target_temperature(call.target, request) == 0
    marks = above * 0
    if RULE == GUMBEL:
        position = request * 0
        if call.scores.HAS_SEEDS:
            position += tl.load(call.scores.positions + request)
        last, depth, bits, token = find_longest(call, request, above, tokens, greedy, position, RULE)
    elif call.tree.ALL_GREEDY:
        last, depth, bits, token = find_longest(call, request, above, tokens, greedy, request, RULE)
    else:
        rate = tl.full([], 1.0, tl.float64)
        rates = tl.zeros([call.tree.LANES], tl.float64)
        since = tl.full([], 0, tl.int32) + call.tree.ROWS
        masses = tl.zeros([call.statistics.BLOCK_COUNT], tl.float64)
        weighed = tl.full([], 0, tl.int32)
        if RULE == TYPICAL:
            last, depth, bits, token = find_longest(call, request, above, tokens, greedy, request, RULE)
        elif call.statistics.TOP_PLANE >= 0:
            token = tl.full([], -1, tl.int32)
            if greedy:
                last, depth, bits, token = find_longest(call, request, above, tokens, greedy, request, RULE)
            else:
                last, depth, bits, marks, left = walk_tree(call, request, above, tokens, RULE)
                rate, rates, since, masses, weighed = left
        else:
            last, depth, bits, marks, left = walk_tree(call, request, above, tokens, RULE)
            rate, rates, since, masses, weighed = left
            token = last * 0 - 1
        if ((at_row(bits, last) & NO_TOKEN) == 0) & (greedy == 0):
            children = (above == with_children(call.tree, last, depth)) & (tokens >= 0)
            rest = Left(rate, rates, since, masses, weighed)
            token = _draw(call, request, last, depth, tokens, children, rest)
    status = _write_path(found, call, request, last, depth, above, tokens, bits, marks)
    return depth, token, status


@triton.jit
def _tree_kernel(
    found,  # Found, written
    call,  # TreeCall
    RULE: tl.constexpr,
    BLOCK_STEPS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_launch_before(DEPENDENT)
    request = tl.program_id(0).to(tl.int64)
    num_accepted = tl.full([], 0, tl.int32)
    token = num_accepted - 1
    status = num_accepted + INVALID_PARAMETER
    if request_is_valid(call.target, call.draft, call.random, call.rule, request, BLOCK_STEPS):
        length = chain_len(call.draft, request)
        num_accepted, token, status = _judge(found, call, request, length, RULE)
    column = tl.arange(0, found.COLUMNS)
    after = (column >= num_accepted) & (column <= call.tree.levels)
    emitted = tl.where(column == num_accepted, token, -1).to(tl.int64)
    tl.store(found.tokens + request * (call.tree.levels + 1) + column, emitted, mask=after)
    none = tl.zeros([found.COLUMNS], tl.int64) - 1
    tl.store(found.path + request * call.tree.levels + column, none, mask=after & (column < call.tree.levels))
    tl.store(found.num_accepted + request, num_accepted.to(tl.int64))
    tl.store(found.num_tokens + request, num_accepted.to(tl.int64) + (token >= 0).to(tl.int64))
    tl.store(found.next_token + request, token.to(tl.int64))
    tl.store(found.status + request, status)


def drafters_apart(target: TargetView, draft: DraftView) -> TargetView | None:
    """The members as drafters, where several drafted and their distributions are no parts of the target; else None.

    They are the parts of a mixture, each filtered by itself.
    """
    weighted = target.weight_rows is None and all(weight != 0 for weight in target.weights)
    same = target.MIXTURE.value and draft.SAME_TEMPERATURE.value and draft.PROCESSED.value
    filtered_alike = draft.filters is None or draft.SAME_FILTERS.value
    if draft.drafters is None or len(target.logits) == 1 or (same and weighted and filtered_alike):
        return None
    return target._replace(
        weights=(1.0,) * len(target.logits),
        weight_rows=None,
        temperature=draft.temperature,
        temperatures=draft.temperatures,
        temperatures_stride=draft.temperatures_stride,
        log_plausibility=None,
        filters=draft.filters,
        edits=target.edits if draft.PROCESSED.value else None,
        mask=target.mask if draft.PROCESSED.value else None,
        EDITED=tl.constexpr(target.EDITED.value and draft.PROCESSED.value),
        FILTERED=draft.FILTERED,
        MIXTURE=tl.constexpr(True),
        WHOLE=tl.constexpr(False),
    )


def draft_of_rows(draft: DraftView, apart: TargetView | None) -> DraftView:
    """What the children of a row were drawn from, in its statistics: a lone member's whichever of them it drew."""
    if apart is not None:
        return without_distribution(draft)
    return draft._replace(drafters=None) if draft.drafters is not None and draft.drafter >= 0 else draft


def as_parts(draft: DraftView) -> DraftView:
    """Drafts whose distributions are the parts of a target."""
    true = tl.constexpr(True)
    return draft._replace(PROCESSED=true, SAME_TEMPERATURE=true, SAME_FILTERS=true)


def weighing_launches(found: Found, call: TreeCall, apart: TargetView | None, kind: int) -> Iterator[Launch]:
    """The rules token, k_seq, traversal and typical. apart: as `drafters_apart` gives it."""
    target, draft = call.target, call.draft
    own = draft_of_rows(draft, apart)
    yield from statistics_launches(call.statistics, target, own)
    if apart is not None:
        yield from statistics_launches(call.drafts, apart, as_parts(draft))
    yield from rule_launches(call.rule, call.statistics, target, draft, call.random)
    yield tree_launch(found, call, kind)


def score_launches(found: Found, call: TreeCall) -> Iterator[Launch]:
    """The rule gumbel."""
    yield from pass_launches(call.scores, call.statistics, call.target, call.draft)
    yield tree_launch(found, call, RuleKind.GUMBEL)


def tree_launch(found: Found, call: TreeCall, kind: int) -> Launch:
    """A program a request."""
    arguments = {"found": found, "call": call, "RULE": int(kind), "BLOCK_STEPS": VALIDATED}
    sizes = (SEARCH_WARPS, SEARCH_REGISTERS) if kind == RuleKind.GUMBEL else (WARPS, None)
    return Launch(_tree_kernel, (batch_of(call.target),), arguments, *sizes)


def tree_call(
    target: TargetView, draft: DraftView, apart: TargetView | None, tree: Tree, random: RandomView, rule: Rule
) -> TreeCall:
    """With statistics unwritten."""
    statistics = drafts = new_statistics(target, draft_of_rows(draft, apart))
    if apart is not None:
        drafts = new_statistics(apart, as_parts(draft))
    chain_kind = RuleKind.TYPICAL if rule.kind == RuleKind.TYPICAL else RuleKind.TOKEN
    by_scores = rule.kind == RuleKind.GUMBEL
    return TreeCall(
        tree_view(target, draft, tree.levels, bool(tree.without_replacement), apart is not None),
        target,
        statistics,
        draft,
        drafts,
        random,
        new_rule(statistics, draft, rule._replace(kind=int(chain_kind)), batch_of(target)),
        score_view(target, statistics, random.seeds, random.positions, False) if by_scores else None,
    )


def tree_found(results: Sequence[Tensor], levels: int) -> Found:
    """What is written of the results."""
    return Found(*results[:6], COLUMNS=tl.constexpr(triton.next_power_of_2(levels + 1)))


def launch(*given_arguments: Any, out: list[Tensor] | None = None, **options: Any) -> list[Tensor]:
    """tokens, num_accepted, num_tokens, next_token, status, path, and reports; see `Verdict`. out: where to."""
    arguments = TreeArguments.of(*given_arguments, **options)
    tree, rule = arguments.tree, arguments.rule
    results = empty_verdict(*given_arguments, **options) if out is None else out
    ready, given = ready_for_kernels(arguments.target), ready_for_kernels(arguments.draft)
    parents = tree.parents.to(torch.int64).contiguous()
    nodes = parents.shape[1]
    target = target_view(ready, nodes + 1, dense_drafts(ready, given) if ready.processing.active else None)
    if target.edits is not None:
        target = target._replace(edits=target.edits._replace(parents=parents, num_drafts=nodes))
    draft = draft_view(target, given)._replace(parents=parents)
    if rule.kind not in (RuleKind.TOKEN, RuleKind.K_SEQ, RuleKind.TRAVERSAL) or not has_draft_distribution(
        target, draft
    ):
        draft = without_distribution(draft)
    if draft.drafters is not None and len(target.logits) == 1:
        draft = draft._replace(drafter=0)
    apart = drafters_apart(target, draft)
    call = tree_call(target, draft, apart, tree, RandomView(*ready_for_kernels(arguments.random_numbers)), rule)
    found = tree_found(results, tree.levels)
    by_scores = rule.kind == RuleKind.GUMBEL
    run(score_launches(found, call) if by_scores else weighing_launches(found, call, apart, rule.kind), parents)
    report(results, call, raw_view(ready, arguments.report, nodes + 1), arguments.report)
    return results


def report(results: Sequence[Tensor], call: TreeCall, raw: TargetView | None, wanted: Report) -> None:
    """Tell what is asked for of the rows on the path, whose statistics are there unless they are told of raw logits."""
    if wanted.logprobs == NO_LOGPROBS:
        return
    tokens, _, _, _, _, path, logprobs, *top = results
    view = ReportView(tokens, tokens.shape[1], logprobs, *(top or (None, None)), wanted.top, path)
    if raw is None and call.scores is None:
        run(report_launches(view, call.statistics, call.target), tokens)
        return
    marked = torch.zeros(tokens.shape[0], call.target.steps, dtype=torch.int8, device=tokens.device)
    rows = (path + 1).clamp(0, call.target.steps - 1)  # `warmup` leaves the path unwritten
    marked.scatter_(1, torch.nn.functional.pad(rows, (1, 0)), 1)
    on_path = DraftView(draft_len=call.target.steps - 1, marked=marked)
    run(raw_report_launches(view, call.target if raw is None else raw, on_path), tokens)
