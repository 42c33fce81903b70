"""Chain verification on a GPU: a pass over the logits, the residual's block masses, and the draw.

Where a draft may come from a distribution, or the target is filtered, a program a request walks the chain first, and
the next launch reads the row of the next token once more, since which row that is depends on all of it. Other draws
from the target and greedy requests need no logits but those of one block: their last launch walks the chain itself. The
block rule and the typical rule read the drafts' rows once more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specens_kernels.arguments import (
    TARGET_LOGPROBS,
    ChainArguments,
    Report,
    Rule,
    ready_for_kernels,
)
from specens_kernels.ops.sample.triton_scores import chain_found
from specens_kernels.ops.sample.triton_scores import launches as score_launches
from specens_kernels.ops.target_logprobs.triton_kernel import BLOCK_REGISTERS, BLOCK_WARPS, statistics_launches
from specens_kernels.ops.verify_chain.triton_report import (
    ReportView,
    emitted_rows,
    new_results,
    raw_report_launches,
    raw_view,
    report_launches,
)
from specens_kernels.ops.verify_chain.triton_rules import rule_launches
from specens_kernels.parts.chain import FROM_RESIDUAL, MOST_LIKELY, NOTHING, Outcome, walk
from specens_kernels.parts.draft import DraftView, dense_drafts, draft_view, row_limit, without_distribution
from specens_kernels.parts.draw import (
    block_probabilities,
    draw_token,
    load_row_states,
    row_states,
    store_row_states,
)
from specens_kernels.parts.launches import Launch, run, wait_for_launch_before
from specens_kernels.parts.rules import BLOCK, RuleView, new_rule, target_share
from specens_kernels.parts.scores import score_view
from specens_kernels.parts.states import block_is_cut, log_probability, target_state
from specens_kernels.parts.statistics import Statistics, new_statistics, tokens_of, top_tokens
from specens_kernels.parts.target import TargetView, batch_of, target_view
from specens_kernels.parts.uniforms import RandomView, uniforms_at
from specens_kernels.rules import RuleKind

STREAM_NEXT = 1
WALK_WARPS = 4  # a plane's TESTED_NUMBERS are eight a thread
MIXED_WALK_REGISTERS = 168  # of a thread: three programs at once; each member has planes, which take up to 151
RESIDUAL_REGISTERS = 64  # of a thread: four programs at once; where no number is told, some releases spill two
EDITED_RESIDUAL_REGISTERS = 80  # three at once: what edits look up takes up to 76
DRAW_WARPS = 16  # a block is eight tokens a thread: a program a request leaves room on a multiprocessor
LARGEST_BLOCK_STEPS, TESTED_NUMBERS = 8, 1024  # draft tokens tested at once, statistics of a plane read for them


@triton.jit
def _walk_kernel(
    outcome,  # Outcome, written but for the next token
    statistics,  # Statistics
    target,  # TargetView
    draft,  # DraftView
    random,  # RandomView
    rule,  # RuleView
    BLOCK_STEPS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_launch_before(DEPENDENT)
    request = tl.program_id(0).to(tl.int64)
    num_accepted, kind, status = walk(outcome, statistics, target, draft, random, rule, request, BLOCK_STEPS)
    tl.store(outcome.num_accepted + request, num_accepted)
    tl.store(outcome.kinds + request, kind)
    tl.store(outcome.status + request, status)
    if (kind != NOTHING) & (kind != MOST_LIKELY):
        step = tl.zeros([1], tl.int64) + num_accepted
        states = row_states(statistics, target, draft, request, step, kind == FROM_RESIDUAL)
        store_row_states(outcome, statistics, request, states)


@triton.jit
def _residual_kernel(
    masses_ptr,  # float32 [batch, planes, blocks], written: the residual's, and those of a filtered target
    outcome,  # Outcome, written but for the next token
    statistics,  # Statistics
    target,  # TargetView
    draft,  # DraftView
    rule,  # RuleView
    DEPENDENT: tl.constexpr,
):
    wait_for_launch_before(DEPENDENT)
    request = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    kind = tl.load(outcome.kinds + request)
    subtracts = kind == FROM_RESIDUAL
    wanted = subtracts
    if statistics.TARGET_SLOTS > 0:
        wanted = (kind != NOTHING) & (kind != MOST_LIKELY)
    if not wanted:
        return
    num_accepted = tl.load(outcome.num_accepted + request)
    step = tl.zeros([1], tl.int64) + num_accepted
    if block_is_cut(statistics, request * target.steps + num_accepted, block):
        masses_ptr += request * statistics.blocks * 2 + block
        tl.store(masses_ptr, 0.0)
        tl.store(masses_ptr + statistics.blocks, 0.0)
        return
    states = load_row_states(outcome, statistics, target, draft, request, step, subtracts)
    probabilities, draft_probabilities = block_probabilities(
        statistics, target, draft, states, request, num_accepted, tokens_of(statistics, block), subtracts
    )
    masses_ptr += request * statistics.blocks + block
    if statistics.TARGET_SLOTS > 0:
        masses_ptr += request * statistics.blocks
        tl.store(masses_ptr + statistics.blocks, tl.sum(probabilities, 0))
    if rule.KIND == BLOCK:
        probabilities *= target_share(rule, draft, request, num_accepted)
    if subtracts:
        tl.store(masses_ptr, tl.sum(tl.maximum(probabilities - draft_probabilities, 0.0), 0))


@triton.jit(do_not_specialize=["first_step", "uniform_stream"])
def _next_token_kernel(
    outcome,  # Outcome, the rest written
    masses_ptr,  # float32 [batch, planes, blocks], or None: none are needed, and the chain is yet to be walked
    statistics,  # Statistics
    target,  # TargetView
    draft,  # DraftView
    random,  # RandomView
    rule,  # RuleView
    first_step,  # of the uniforms' steps
    uniform_stream,  # of the next token's uniform
    BLOCK_STEPS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_launch_before(DEPENDENT)
    request = tl.program_id(0).to(tl.int64)
    if masses_ptr is None:
        num_accepted, kind, status = walk(outcome, statistics, target, draft, random, rule, request, BLOCK_STEPS)
        tl.store(outcome.num_accepted + request, num_accepted)
    else:
        num_accepted = tl.load(outcome.num_accepted + request)
        kind = tl.load(outcome.kinds + request)
        status = tl.load(outcome.status + request)
    step = tl.zeros([1], tl.int64) + num_accepted
    rows = request * target.steps + step
    token = -1
    logprob = 0.0
    if kind != NOTHING:
        if rule.COMPARES:
            token = tl.max(top_tokens(statistics, rows, rows >= 0), 0)
        elif kind == MOST_LIKELY:
            if statistics.TOP_PLANE >= 0:
                token = tl.max(top_tokens(statistics, rows, rows >= 0), 0)
        else:
            uniform = tl.max(
                uniforms_at(random, draft, request, draft.draft_len, step + first_step, uniform_stream, step >= 0), 0
            )
            token, bits = draw_token(
                outcome, masses_ptr, statistics, target, draft, rule, request, num_accepted, kind, uniform
            )
            status |= bits
        if outcome.logprobs is not None:
            state, _ = target_state(statistics, target, request, rows, rows >= 0)
            tokens = (rows & 0) + token
            own = log_probability(statistics, target, state, request, step, tokens, tokens >= 0, tl.float64)
            logprob = tl.max(own, 0).to(tl.float32)
    first = request * (draft.draft_len + 1)
    unused = num_accepted < draft.draft_len  # the last column lies after the next token
    tl.store(outcome.tokens + first + num_accepted, token)
    tl.store(outcome.tokens + first + draft.draft_len, -1, mask=unused)
    if outcome.logprobs is not None:
        tl.store(outcome.logprobs + first + num_accepted, logprob)
        tl.store(outcome.logprobs + first + draft.draft_len, 0.0, mask=unused)
    tl.store(outcome.num_tokens + request, num_accepted + (token >= 0).to(tl.int64))
    tl.store(outcome.next_token + request, token)
    tl.store(outcome.status + request, status)


def new_outcome(results: Sequence[Tensor], statistics: Statistics, kind: int, logprobs: bool) -> Outcome:
    """What is to be written of results. logprobs: whether the target's are asked for."""
    tokens, num_accepted, num_tokens, next_token, status, *reported = results
    residuals = statistics.DRAFT_PLANE.value >= 0 and RuleKind(kind).subtracts
    later = not RuleKind(kind).compares and (residuals or statistics.TARGET_SLOTS.value > 0)
    numbers = 2 * statistics.PARTS.value + 1 + statistics.TARGET_SLOTS.value + statistics.WHOLE.value + 3
    states = torch.empty(len(status), numbers, dtype=torch.float32, device=status.device) if later else None
    return Outcome(
        tokens=tokens,
        num_accepted=num_accepted,
        num_tokens=num_tokens,
        next_token=next_token,
        logprobs=reported[0] if logprobs else None,
        status=status,
        kinds=torch.empty_like(status) if later else None,
        states=states,
        STATE_NUMBERS=tl.constexpr(numbers),
    )


def launches(
    outcome: Outcome,
    statistics: Statistics,
    target: TargetView,
    draft: DraftView,
    rule: RuleView,
    random: RandomView,
    first_step: int,
    stream: int,
) -> Iterator[Launch]:
    """Two launches; two between them where masses are needed for the draw, and those that filters and rules add.

    A chain of length 0 is a plain draw.
    """
    yield from statistics_launches(statistics, target, draft)
    yield from rule_launches(rule, statistics, target, draft, random)
    batch, blocks = batch_of(target), statistics.blocks
    block_steps = min(LARGEST_BLOCK_STEPS, max(1, TESTED_NUMBERS // statistics.BLOCK_COUNT.value))
    shared = {"outcome": outcome, "statistics": statistics, "target": target, "draft": draft, "rule": rule}
    walked = shared | {"random": random, "BLOCK_STEPS": block_steps}
    masses = None
    if outcome.kinds is not None:
        planes = 1 + (statistics.TARGET_SLOTS.value > 0)
        masses = torch.empty(batch, planes, blocks, dtype=torch.float32, device=outcome.tokens.device)
        mixed = target.MIXTURE.value and len(target.logits) > 1
        limit = MIXED_WALK_REGISTERS if mixed else BLOCK_REGISTERS
        yield Launch(_walk_kernel, (batch,), walked, WALK_WARPS, limit)
        weighed = shared | {"masses_ptr": masses}
        limit = RESIDUAL_REGISTERS if target.edits is None else EDITED_RESIDUAL_REGISTERS
        yield Launch(_residual_kernel, (batch, blocks), weighed, BLOCK_WARPS, limit)
    drawn = walked | {"masses_ptr": masses, "first_step": first_step, "uniform_stream": stream}
    yield Launch(_next_token_kernel, (batch,), drawn, DRAW_WARPS, BLOCK_REGISTERS)


class Call(NamedTuple):
    """What is decided and told of a batch."""

    target: TargetView
    raw: TargetView | None  # what log-probabilities are told of, where it is another
    draft: DraftView
    rule: Rule
    random: RandomView
    first_step: int  # of the uniforms' steps
    stream: int  # of the next token's uniform
    report: Report


def decide(call: Call, results: Sequence[Tensor] | None = None) -> Sequence[Tensor]:
    """Launch everything and return the results, which are given or new."""
    target, draft, report = call.target, call.draft, call.report
    if results is None:
        results = new_results(batch_of(target), draft.draft_len + 1, report, target.logits[0].device)
    statistics = new_statistics(target, draft, all_tops=RuleKind(call.rule.kind).compares)
    outcome = new_outcome(results, statistics, call.rule.kind, report.logprobs == TARGET_LOGPROBS)
    rule = new_rule(statistics, draft, call.rule, batch_of(target))
    run(launches(outcome, statistics, target, draft, rule, call.random, call.first_step, call.stream), results[0])
    _report(results, draft.draft_len + 1, statistics, target, call.raw, report)
    return results


def launch(*given: Any, out: Sequence[Tensor] | None = None, **options: Any) -> list[Tensor]:
    """tokens, num_accepted, num_tokens, next_token, status, and what is reported; see `Verdict`. out: where to."""
    return list(_launch(ChainArguments.of(*given, **options), out))


def _launch(arguments: ChainArguments, out: Sequence[Tensor] | None) -> Sequence[Tensor]:
    ready, steps = ready_for_kernels(arguments.target), row_limit(arguments.target, arguments.draft)
    drafts = dense_drafts(ready, arguments.draft) if ready.processing.active else None
    target = target_view(ready, steps, drafts)
    draft = draft_view(target, ready_for_kernels(arguments.draft))
    kind, report = RuleKind(arguments.rule.kind), arguments.report
    if kind == RuleKind.GUMBEL:
        return _by_scores(arguments, target, without_distribution(draft), raw_view(ready, report, steps), out)
    if not kind.subtracts and not kind.compares:
        draft = without_distribution(draft)
    random = RandomView(None, None, None) if kind.compares else RandomView(*ready_for_kernels(arguments.random_numbers))
    call = Call(target, raw_view(ready, report, steps), draft, arguments.rule, random, 0, STREAM_NEXT, report)
    return decide(call, out)


def _by_scores(
    arguments: ChainArguments,
    target: TargetView,
    draft: DraftView,
    raw: TargetView | None,
    out: Sequence[Tensor] | None,
) -> Sequence[Tensor]:
    """Under the rule gumbel, which weighs nothing against what drafts were drawn from."""
    report, columns = arguments.report, draft.draft_len + 1
    results = out if out is not None else new_results(batch_of(target), columns, report, target.logits[0].device)
    statistics, told = new_statistics(target, draft), report.logprobs == TARGET_LOGPROBS
    random = ready_for_kernels(arguments.random_numbers)
    scores = score_view(
        target, statistics, random.seeds, random.positions, told or (report.top > 0 and raw is None), chain=True
    )
    found = chain_found(results, target.steps, told)
    run(score_launches(found, scores, statistics, target, draft), results[0])
    _report(results, columns, statistics, target, raw, report)
    return results


def _report(
    results: Sequence[Tensor],
    columns: int,
    statistics: Statistics,
    target: TargetView,
    raw: TargetView | None,
    report: Report,
) -> None:
    """Tell what needs another pass over the rows of emitted tokens."""
    tokens, num_tokens = results[0], results[2]
    if raw is not None:
        logprobs, *top = results[5:]
        view = ReportView(tokens, columns, logprobs, *(top or (None, None)), report.top)
        run(raw_report_launches(view, raw, emitted_rows(raw, num_tokens)), tokens)
    elif report.top > 0:
        view = ReportView(tokens, columns, None, *results[6:], report.top)
        run(report_launches(view, statistics, target), tokens)
