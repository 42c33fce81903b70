"""A draw from the target on a GPU: the verification of a chain without drafts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specens_kernels.arguments import (
    NO_LOGPROBS,
    TARGET_LOGPROBS,
    Report,
    Rule,
    Stream,
    ready_for_kernels,
    report_of,
    stream_of,
    target_of,
    uniforms_of,
)
from specens_kernels.ops.sample.reference import one_step
from specens_kernels.ops.sample.triton_scores import draw_found
from specens_kernels.ops.sample.triton_scores import launches as launches_of_scores
from specens_kernels.ops.target_logprobs.triton_kernel import statistics_launches
from specens_kernels.ops.verify_chain.triton_kernel import Call, decide
from specens_kernels.ops.verify_chain.triton_report import ReportView, raw_view, report_launches
from specens_kernels.parts.draft import DraftView
from specens_kernels.parts.launches import run
from specens_kernels.parts.scores import score_view
from specens_kernels.parts.statistics import Statistics, new_statistics
from specens_kernels.parts.target import TargetView, batch_of, target_view
from specens_kernels.parts.uniforms import RandomView
from specens_kernels.rules import RuleKind

TOKEN_RULE = Rule(int(RuleKind.TOKEN), 0.0, 0.0)  # without drafts every rule is a plain draw


def launch(member_logits: list[Tensor], *, out: list[Tensor] | None = None, **options: Any) -> list[Tensor]:
    """tokens int64 [batch], status int32 [batch], and what is reported; see `Draw`. out: where to."""
    results = _launch(member_logits, **options)
    if out is None:
        return results
    for into, values in zip(out, results, strict=True):
        into.copy_(values)
    return out


def _launch(member_logits: list[Tensor], **options: Any) -> list[Tensor]:
    random, stream, report = uniforms_of(options), stream_of(options), report_of(options)
    ready = ready_for_kernels(one_step(target_of(member_logits, options)))
    target, random = target_view(ready, 1), RandomView(*ready_for_kernels(random))
    if stream.best > 0:
        return best_tokens(target, raw_view(ready, report, 1), random, stream, report)
    call = Call(target, raw_view(ready, report, 1), DraftView(), TOKEN_RULE, random, stream.step, stream.stream, report)
    _, _, _, next_token, status, *reported = decide(call)
    return [next_token, status, *(values[:, 0] for values in reported)]


def best_tokens(
    target: TargetView, raw: TargetView | None, random: RandomView, stream: Stream, report: Report
) -> list[Tensor]:
    """Those of the best scores, int64 [batch, best]; the same."""
    batch, device = batch_of(target), target.logits[0].device
    shape, draft = (batch, stream.best), DraftView()
    tokens = torch.empty(shape, dtype=torch.int64, device=device)
    status = torch.empty(batch, dtype=torch.int32, device=device)
    statistics, told = new_statistics(target, draft), report.logprobs == TARGET_LOGPROBS
    logprobs = torch.empty(shape, dtype=torch.float32, device=device) if report.logprobs != NO_LOGPROBS else None
    scores = score_view(target, statistics, random.seeds, random.positions, told or (report.top > 0 and raw is None))
    found = draw_found(tokens, logprobs if told else None, status, stream.step)
    run(launches_of_scores(found, scores, statistics, target, draft), tokens)
    if report.logprobs == NO_LOGPROBS:
        return [tokens, status]
    return [tokens, status, logprobs, *_report_rows(tokens, logprobs, statistics, target, raw, report)]


def _report_rows(
    tokens: Tensor,
    logprobs: Tensor | None,
    statistics: Statistics,
    target: TargetView,
    raw: TargetView | None,
    report: Report,
) -> list[Tensor]:
    """Write the raw log-probability of each token, and return the most likely tokens of each row."""
    batch, device = tokens.shape[0], tokens.device
    top = [torch.empty(batch, 1, report.top, dtype=dtype, device=device) for dtype in (torch.int64, torch.float32)]
    top = top if report.top > 0 else []
    if raw is not None:
        found_one = (tokens[:, 0] >= 0).long()
        statistics, target = new_statistics(raw, DraftView()), raw
        run(statistics_launches(statistics, raw, DraftView(draft_len=1, lens=found_one)), tokens)
        for column in range(tokens.shape[1]):
            own = tokens[:, column : column + 1].contiguous()
            values = torch.empty_like(own, dtype=torch.float32)
            view = ReportView(own, 1, values, None, None, 0)
            run(report_launches(view, statistics, raw), tokens)
            logprobs[:, column : column + 1] = values
    if report.top > 0:
        view = ReportView(tokens[:, :1].contiguous(), 1, None, *top, report.top)
        run(report_launches(view, statistics, target), tokens)
    return [values[:, 0] for values in top]
