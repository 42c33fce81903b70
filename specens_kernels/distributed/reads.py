"""All rows of a call, read side by side: those of the target, what drafts were drawn from, and what is reported."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from specens_kernels.arguments import NO_LOGPROBS, TARGET_LOGPROBS, RandomSource, Report, Target
from specens_kernels.distributed.draw import DenseReports, Noise, Reports, best_steps
from specens_kernels.distributed.shard import Shard
from specens_kernels.distributed.slices import Slices
from specens_kernels.distributed.steps import Steps, together
from specens_kernels.distributed.target import (
    DraftRows,
    Looked,
    Rows,
    direct_steps,
    first_if_greedy,
    no_draft_rows,
    raw_slices,
    reports_of,
    sliced_best_steps,
    target_steps,
)
from specens_kernels.ops.target_logprobs.processing import Paths
from specens_kernels.ops.target_logprobs.reference import raw
from specens_kernels.rules import RuleKind


class Read(NamedTuple):
    """What all ranks know of the rows, but for their local log-probabilities."""

    rows: Rows
    draft: DraftRows
    told: Rows  # whose log-probabilities are reported: the same rows, or those of the raw ensemble
    reports: Reports
    picked: Tensor  # int64 [batch, rows], the most likely token or that of the best score
    of_picked: Tensor | None  # float64 [batch, rows], their reported log-probabilities; None: not known


def noise_at(kind: RuleKind, random: RandomSource, depth: Tensor) -> Noise:
    """The noise of rows that come so many tokens after `positions`."""
    if kind != RuleKind.GUMBEL or random.positions is None:
        return Noise(None, None)
    return Noise(random.seeds, random.positions[:, None] + depth)


def read_rows(
    shard: Shard,
    target: Target,
    tokens: Tensor,
    before: Tensor | Paths,
    looked: Looked,
    noise: Noise,
    kind: RuleKind,
    report: Report,
    *,
    direct: bool,
    drafts: Steps[DraftRows] | None,
    slices: Slices | None = None,
) -> Steps[Read]:
    """In as many collectives as the longest of the parts takes.

    tokens: int64, the drafts. drafts: what they were drawn from, None where that is not looked at. direct:
        whether the best tokens are all that is told of the rows. slices: where kernels have read them.
    """
    draft = no_draft_rows(tokens, looked, shard.width)
    if direct:
        rows, _ = yield from direct_steps(shard, target, before, noise, slices=slices)
        return Read(rows, draft, rows, DenseReports(rows.logprobs, shard.start), rows.most_likely, None)
    draws = not (kind.subtracts or kind.picks or kind == RuleKind.TYPICAL)  # and tells nothing else of rows
    parts: list[Steps[Any]] = [target_steps(shard, target, before, looked, kind.compares, slices, draws)]
    if drafts is not None:
        parts.append(drafts)
    if report.logprobs not in (NO_LOGPROBS, TARGET_LOGPROBS):
        of_raw = None if slices is None else raw_slices(slices)
        parts.append(target_steps(shard, raw(target), before, looked, slices=of_raw))
    rows, *others = yield from together(*parts)
    draft = draft if drafts is None else others.pop(0)
    told = others[0] if others else rows
    reports = reports_of(shard, told)
    if kind != RuleKind.GUMBEL:
        return Read(rows, draft, told, reports, rows.most_likely, None if others else rows.best)
    if rows.slices is not None:
        of_best = None if report.logprobs == NO_LOGPROBS else reports
        best = yield from sliced_best_steps(shard, before, noise, rows, rows.slices, of_best)
        return Read(rows, draft, told, reports, best.tokens[..., 0], best.logprobs[..., 0])
    of_tokens = None if report.logprobs == NO_LOGPROBS else told.logprobs
    best = yield from best_steps(shard, first_if_greedy(shard, rows), rows.greedy, noise, 1, rows.status, of_tokens)
    return Read(rows, draft, told, reports, best.tokens[..., 0], best.logprobs[..., 0])
