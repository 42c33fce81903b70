"""Single rows on several ranks: `sample` and `target_logprobs`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specens_kernels.arguments import (
    NO_LOGPROBS,
    TARGET_LOGPROBS,
    RandomSource,
    Stream,
    report_of,
    stream_of,
    target_of,
    uniforms_of,
)
from specens_kernels.distributed.draw import Choice, Masses, Noise, Reports, best_steps, draw_steps, reported, top_steps
from specens_kernels.distributed.shard import Shard, shifted
from specens_kernels.distributed.slices import SlicedChoice, SlicedReports, Slices, no_drafts
from specens_kernels.distributed.steps import Steps, together
from specens_kernels.distributed.target import (
    OPERATORS_OF_RULES,
    Looked,
    Rows,
    always_greedy,
    direct_steps,
    first_if_greedy,
    kernels_read,
    masses_here,
    operators_of,
    places_of,
    probabilities,
    raw_slices,
    reports_of,
    scores_need_no_sums,
    sliced_best_steps,
    target_steps,
)
from specens_kernels.ops.sample.reference import invalid_uniform, one_step
from specens_kernels.ops.target_logprobs.reference import one_hot, raw
from specens_kernels.ops.uniforms.reference import uniforms as philox_uniforms
from specens_kernels.results import Status
from specens_kernels.rules import RuleKind


def nothing_looked_up(like: Tensor) -> Looked:
    none = torch.zeros(like.shape[0], 0, dtype=torch.int64, device=like.device)
    return Looked(none, none)


def score_steps(
    shard: Shard, member_logits: list[Tensor], *, draft_tokens: Tensor | None = None, **options: Any
) -> Steps[Tensor]:
    """float32 [batch, steps, width]: this rank's part of `target_logprobs`."""
    target = target_of(member_logits, options)
    target = target._replace(processing=shifted(shard, target.processing))
    before = None if draft_tokens is None else shard.own(draft_tokens)
    looked, slices = nothing_looked_up(member_logits[0]), None
    steps = torch.arange(member_logits[0].shape[1], device=looked.rows.device).expand(member_logits[0].shape[:2])
    if kernels_read(shard, target):
        tokens = looked.tokens if before is None else before
        tokens = torch.nn.functional.pad(tokens, (0, max(0, steps.shape[1] - 1 - tokens.shape[1])), value=-1)
        looked = Looked(tokens[:, : max(0, steps.shape[1] - 1)], steps[:, :-1])
        slices = Slices(shard, target, no_drafts(target, looked.tokens), looked.tokens)
    rows = yield from target_steps(shard, target, before, looked, slices=slices)
    logprobs = rows.logprobs
    if rows.slices is not None:
        logprobs = SlicedReports(rows.slices, *rows.parts[1:]).of_rows(steps)
    certain = one_hot(shard.own(rows.most_likely), logprobs.shape[-1]) * rows.alive[..., None]
    logprobs = torch.where(rows.greedy[:, None, None], certain.log(), logprobs)
    return torch.where(rows.invalid[:, None, None], -torch.inf, logprobs).float()


def sample_steps(shard: Shard, member_logits: list[Tensor], **options: Any) -> Steps[list[Tensor]]:
    """What the operator `sample` gives."""
    target, source, stream = one_step(target_of(member_logits, options)), uniforms_of(options), stream_of(options)
    target = target._replace(processing=shifted(shard, target.processing))
    report, count = report_of(options), max(stream.best, 1)
    looked = nothing_looked_up(member_logits[0])
    noise = Noise(None, None)
    if stream.best > 0 and source.positions is not None:
        noise = Noise(source.seeds, (source.positions + stream.step)[:, None])
    best = OPERATORS_OF_RULES[RuleKind.GUMBEL] if stream.best > 0 else []
    by_best, slices = stream.best > 0 or always_greedy(target), None
    direct = by_best and scores_need_no_sums(target) and report.logprobs == NO_LOGPROBS
    reads = not direct or target.plausibility > 0
    if reads and kernels_read(shard, target, *operators_of(report, stream.best > 0), *best):
        slices = Slices(shard, target, no_drafts(target, looked.tokens), looked.tokens)
    if direct:
        rows, tokens = yield from direct_steps(shard, target, None, noise, count, slices)
        told: list[Any] = []
    else:
        parts = [target_steps(shard, target, None, looked, slices=slices, by_ranks=stream.best == 0)]
        if report.logprobs not in (NO_LOGPROBS, TARGET_LOGPROBS):
            of_raw = None if slices is None else raw_slices(slices)
            parts.append(target_steps(shard, raw(target), None, looked, slices=of_raw))
        rows, *others = yield from together(*parts)
        told_rows, first = others[0] if others else rows, torch.zeros_like(rows.status)
        reports: Reports = reports_of(shard, told_rows)
        logprobs = None if report.logprobs == NO_LOGPROBS else reports.of_row(first[:, 0])
        if rows.slices is None:
            chosen = chosen_steps(shard, rows, source, stream, noise, logprobs)
        else:
            uniform = uniforms_of_draw(source, stream, rows)
            by_scores = noise if stream.best > 0 else None
            chosen = sliced_steps(shard, rows, rows.slices, uniform, by_scores, count, reports, logprobs)
        if logprobs is None:
            (tokens, _), told = (yield from chosen), []
        else:
            (tokens, of_tokens), top = yield from together(chosen, top_steps(reports, first, report.top))
            told = [of_tokens[:, 0], top]
    tokens = tokens[:, 0]
    invalid = rows.invalid
    if stream.best == 0:
        invalid = invalid | (invalid_uniform(uniforms_of_draw(source, stream, rows)) & ~rows.greedy)
    status = torch.where(invalid, Status.INVALID_PARAMETER, rows.status[:, 0])
    tokens = torch.where(invalid[:, None], -1, tokens)
    shaped = tokens if stream.best > 0 else tokens[:, 0]
    if not told:
        return [shaped, status.int()]
    own, *of_rows = reported(told[0], tokens, told[1])
    return [shaped, status.int(), own.view_as(shaped), *[values[:, 0] for values in of_rows]]


def uniforms_of_draw(source: RandomSource, stream: Stream, rows: Rows) -> Tensor:
    if source.uniforms is not None:
        return source.uniforms.double()
    if source.seeds is not None and source.positions is not None:
        return philox_uniforms(source.seeds, source.positions, stream.step, stream.stream)
    return torch.zeros_like(rows.greedy, dtype=torch.float64)


def masses_of_ranks(rows: Rows) -> Masses | None:
    """Of the one row, where they are known."""
    return None if rows.of_ranks is None else Masses.of_target(rows.of_ranks).at(torch.zeros_like(rows.status[:, 0]))


def chosen_steps(
    shard: Shard, rows: Rows, source: RandomSource, stream: Stream, noise: Noise, logprobs: Tensor | None
) -> Steps[tuple[Tensor, Tensor]]:
    """Tokens int64 [batch, 1, count], and what logprobs [batch, width], where they are given, say of them."""
    if stream.best > 0:
        scores = first_if_greedy(shard, rows)
        own = None if logprobs is None else logprobs[:, None]
        best = yield from best_steps(shard, scores, rows.greedy, noise, stream.best, rows.status, own)
        return best.tokens, best.logprobs
    masses = probabilities(shard, rows)[:, 0]
    uniform = torch.where(rows.greedy, 0.0, uniforms_of_draw(source, stream, rows))
    choice = Choice(masses, masses, torch.zeros_like(rows.greedy), uniform, logprobs, shard.start)
    drawn = yield from draw_steps(shard, choice, masses_of_ranks(rows))
    return drawn.tokens[:, None, None], drawn.logprobs[:, None, None]


def sliced_steps(
    shard: Shard,
    rows: Rows,
    slices: Slices,
    uniform: Tensor,
    noise: Noise | None,
    count: int,
    reports: Reports,
    logprobs: Tensor | None,
) -> Steps[tuple[Tensor, Tensor]]:
    """`chosen_steps` of rows that kernels have read.

    noise: None: by inverse CDF. count: of tokens, else. logprobs: those of `reports`.
    """
    if noise is not None:
        of_best = None if logprobs is None else reports
        best = yield from sliced_best_steps(shard, None, noise, rows, slices, of_best, count)
        return best.tokens, best.logprobs
    own = masses_here(shard, rows)
    places = places_of(slices, rows.parts, torch.zeros_like(own, dtype=torch.int64))
    never = torch.zeros_like(rows.greedy)
    certain = torch.where(rows.alive[:, 0] & rows.greedy, rows.most_likely[:, 0], -1)
    given = places, slices.nothing_left, own[:, 0], never, uniform, logprobs, certain
    drawn = yield from draw_steps(shard, SlicedChoice(slices, *given), masses_of_ranks(rows))
    return drawn.tokens[:, None, None], drawn.logprobs[:, None, None]
