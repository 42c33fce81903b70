"""Single rows on several ranks: `sample` and `target_logprobs`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specens_kernels.arguments import (
    NO_DRAFTER,
    NO_LOGPROBS,
    TARGET_LOGPROBS,
    Draft,
    RandomSource,
    Stream,
    Target,
    report_of,
    stream_of,
    target_of,
    uniforms_of,
)
from specens_kernels.distributed.draw import Choice, Noise, best_steps, draw_steps, reported, top_steps
from specens_kernels.distributed.shard import Shard, shifted
from specens_kernels.distributed.slices import Places, SlicedChoice, Slices, by_parts, least_of, residuals
from specens_kernels.distributed.steps import Steps, together
from specens_kernels.distributed.target import (
    Looked,
    Rows,
    always_greedy,
    direct_steps,
    first_if_greedy,
    kernels_read,
    masses_here,
    probabilities,
    scores_need_no_sums,
    target_steps,
)
from specens_kernels.ops.sample.reference import invalid_uniform, one_step
from specens_kernels.ops.target_logprobs.reference import raw
from specens_kernels.ops.uniforms.reference import uniforms as philox_uniforms
from specens_kernels.results import Status


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
    rows = yield from target_steps(shard, target, before, nothing_looked_up(member_logits[0]))
    logprobs = torch.where(rows.greedy[:, None, None], probabilities(shard, rows).log(), rows.logprobs)
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
    by_best = stream.best > 0 or always_greedy(target)
    if by_best and scores_need_no_sums(target) and report.logprobs == NO_LOGPROBS:
        rows, tokens = yield from direct_steps(shard, target, None, noise, count)
        told: list[Any] = []
    else:
        slices = None
        if not by_best and report.logprobs == NO_LOGPROBS and kernels_read(shard, target):
            slices = Slices(shard, target, no_drafts(target, looked.tokens), looked.tokens)
        parts = [target_steps(shard, target, None, looked, slices=slices)]
        if report.logprobs not in (NO_LOGPROBS, TARGET_LOGPROBS):
            parts.append(target_steps(shard, raw(target), None, looked))
        rows, *others = yield from together(*parts)
        logprobs = (others[0] if others else rows).logprobs if report.logprobs != NO_LOGPROBS else None
        chosen = chosen_steps(shard, rows, source, stream, noise, logprobs)
        if slices is not None:
            chosen = sliced_steps(shard, target, rows, slices, uniforms_of_draw(source, stream, rows))
        if logprobs is None:
            (tokens, _), told = (yield from chosen), []
        else:
            (tokens, of_tokens), top = yield from together(chosen, top_steps(shard, logprobs, report.top))
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


def chosen_steps(
    shard: Shard, rows: Rows, source: RandomSource, stream: Stream, noise: Noise, logprobs: Tensor | None
) -> Steps[tuple[Tensor, Tensor]]:
    """Tokens int64 [batch, 1, count], and what logprobs [batch, 1, width], where they are given, say of them."""
    if stream.best > 0:
        scores = first_if_greedy(shard, rows)
        best = yield from best_steps(shard, scores, rows.greedy, noise, stream.best, rows.status, logprobs)
        return best.tokens, best.logprobs
    masses = probabilities(shard, rows)[:, 0]
    uniform = torch.where(rows.greedy, 0.0, uniforms_of_draw(source, stream, rows))
    own = None if logprobs is None else logprobs[:, 0]
    choice = Choice(masses, masses, torch.zeros_like(rows.greedy), uniform, own, shard.start)
    drawn = yield from draw_steps(shard, choice)
    return drawn.tokens[:, None, None], drawn.logprobs[:, None, None]


def no_drafts(target: Target, tokens: Tensor) -> Draft:
    return Draft(tokens, None, None, None, None, NO_DRAFTER, 0, 1, target.sampling)


def sliced_steps(
    shard: Shard, target: Target, rows: Rows, slices: Slices, uniform: Tensor
) -> Steps[tuple[Tensor, Tensor]]:
    """`chosen_steps` by inverse CDF of rows that kernels have read; nothing is reported."""
    own = masses_here(shard, target, rows)
    first, whole = torch.zeros_like(own, dtype=torch.int64), torch.ones_like(own)
    least = least_of(rows.least, None, slices.numbers)
    places = Places(first, whole, by_parts(rows.masses, own[:, :0], -1.0), least)
    never = torch.zeros_like(rows.greedy)
    choice = SlicedChoice(slices, places, residuals(slices, places)[:, 0], own[:, 0], never, uniform)
    drawn = yield from draw_steps(shard, choice)
    likely = torch.where(rows.alive, rows.most_likely, -1)[:, 0]
    tokens = torch.where(rows.greedy, likely, drawn.tokens)
    return tokens[:, None, None], drawn.logprobs[:, None, None]
