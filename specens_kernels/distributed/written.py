"""Targets of which a slice is known once all ranks have told something of it, as kernels read them.

Such are mixtures of probabilities that are looked at as a whole, and tokens that are plausible. The slice's
log-probabilities are written down as float32, and read as the logits of a lone model that nothing edits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specens_kernels.arguments import NO_DRAFTER, Draft, SamplingArguments, Target
from specens_kernels.distributed.shard import Shard, usable
from specens_kernels.distributed.slices import SlicedReports, Slices, has_source, logits_of_drafters
from specens_kernels.distributed.steps import Steps
from specens_kernels.ensembles import EnsembleKind
from specens_kernels.ops.target_logprobs.processing import Paths
from specens_kernels.ops.target_logprobs.reference import pad_vocab, raw


def may_be_greedy(target: Target) -> bool:
    return target.sampling.temperatures is not None or target.sampling.temperature == 0


def is_written(target: Target, compares: bool) -> bool:
    """Whether rows are read once more as a lone model's. compares: whether drafts are compared with the likeliest."""
    if target.ensemble != EnsembleKind.MIXTURE:
        return target.plausibility > 0
    return compares or may_be_greedy(target) or (target.sampling.filters and not target.filter_members)


def lone_draft(shard: Shard, target: Target, draft: Draft, before: Tensor | Paths, rows: int) -> Draft:
    """The draft with logits of its own, which nothing edits: it lies beside any target. rows: where it was drawn."""
    if not has_source(draft):
        return draft
    members = [logits[:, :rows] for logits in logits_of_drafters(target, draft)]
    if draft.processed and (target.processing.active or target.allowed is not None):
        edits = target if target.allowed is None else target._replace(allowed=target.allowed[:, :rows])
        members = [usable(shard, logits, edits, before)[0].float() for logits in members]
    logits = members[0]
    if draft.drafters is not None and len(members) > 1:
        stack = torch.stack([pad_vocab(own.float(), shard.width, -math.inf) for own in members], 2)
        member = draft.drafters.long().clamp(0, len(members) - 1)[..., None, None]
        logits = stack.gather(2, member.expand(-1, -1, 1, shard.width))[:, :, 0]
    return draft._replace(logits=logits, drafters=None, drafter=NO_DRAFTER, processed=0)


def written_target(target: Target, logits: Tensor) -> Target:
    """A lone model with these logits at temperature 1; greedy requests stay greedy."""
    own = target.sampling
    temperatures = None if own.temperatures is None else (own.temperatures != 0).float()
    sampling = SamplingArguments(temperatures, None, None, None, 0, 0, float(own.temperature != 0), 1.0, 0.0)
    return Target(None, None, None, EnsembleKind.SINGLE, 0, 0.0, [logits], (1.0,), sampling)


def written_mixture(reports: SlicedReports) -> Target:
    """A mixture that kernels have read, of what is kept of its members."""
    return written_target(reports.slices.target, _all_rows(reports))


def _all_rows(reports: SlicedReports) -> Tensor:
    batch, steps, _ = reports.masses.shape
    return reports.of_rows(torch.arange(steps, device=reports.masses.device).expand(batch, -1))


def plausible_steps(slices: Slices) -> Steps[Target]:
    """The plausible tokens of a mixture of logits, which kernels have read as if all were: a collective."""
    target, plain = slices.target, raw(slices.target).sampling
    lone = target._replace(member_logits=target.member_logits[:1], ensemble=EnsembleKind.SINGLE, plausibility=0.0)
    first = slices.of(lone._replace(weight_rows=None, weights=(1.0,), sampling=plain), drafted=False)
    heard = yield torch.cat([own.numbers.largest[..., 0] for own in (first, slices)], 1)
    largest = heard.amax(0).chunk(2, 1)
    near, mixed = (_relative_to(own, of_rows) for own, of_rows in zip((first, slices), largest))
    near = pad_vocab(near, mixed.shape[-1], -math.inf)
    excluded = (near < math.log(target.plausibility)) & (largest[0] > -math.inf)[..., None]
    return written_target(target, torch.where(excluded, -math.inf, mixed))


def _relative_to(slices: Slices, largest: Tensor) -> Tensor:
    """Logits over the temperature, relative to the largest ones of rows, [batch, rows]."""
    there = torch.where(largest > -math.inf, 1.0, -1.0).double()
    return _all_rows(
        SlicedReports(slices, there[..., None], None, largest[..., None], torch.zeros_like(there)[..., None])
    )
