"""The target and draft distributions of rows whose logits lie on several ranks."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from specens_kernels.arguments import (
    NO_DRAFTER,
    NO_LOGPROBS,
    NO_PROCESSING,
    Draft,
    Report,
    SamplingArguments,
    Target,
)
from specens_kernels.distributed import local
from specens_kernels.distributed.draw import Best, DenseReports, Noise, Reports, best_here, ranked, winner_steps
from specens_kernels.distributed.filters import Filter, filter_of
from specens_kernels.distributed.local import best_by_kernel, has_kernel, split_at_block
from specens_kernels.distributed.shard import Shard, usable
from specens_kernels.distributed.slices import (
    Places,
    SlicedReports,
    SlicedRows,
    Slices,
    best_kept,
    by_parts,
    has_source,
    least_of,
    logits_of_drafters,
    without_filters,
)
from specens_kernels.distributed.softmax import Here, OfRanks, Softmax, Source, softmax_steps
from specens_kernels.distributed.steps import Steps
from specens_kernels.distributed.written import is_written, may_be_greedy, plausible_steps, written_mixture
from specens_kernels.ensembles import EnsembleKind
from specens_kernels.ops.target_logprobs.processing import Paths, invalid_penalties
from specens_kernels.ops.target_logprobs.reference import (
    Parameters,
    constants,
    invalid_weights,
    mixed_logits,
    one_hot,
    parameters,
    raw,
)
from specens_kernels.results import Status
from specens_kernels.rules import RuleKind


class Looked(NamedTuple):
    """Tokens whose probability every rank is to know."""

    tokens: Tensor  # int64 [batch, n], of the shard
    rows: Tensor  # int64 [batch, n]


class Rows(NamedTuple):
    """Target distributions before greedy requests are made one-hot. The same on all ranks, but for the first."""

    logprobs: Tensor  # float64 [batch, rows, width], of this rank's tokens; unfiltered at temperature 1 if greedy
    looked_up: Tensor  # float64 [batch, n]
    most_likely: Tensor  # int64 [batch, rows], of the whole vocabulary
    best: Tensor  # float64 [batch, rows], its log-probability
    alive: Tensor  # bool [batch, rows]
    status: Tensor  # int64 [batch, rows]
    greedy: Tensor  # bool [batch]
    invalid: Tensor  # bool [batch]
    parts: Parts
    of_ranks: OfRanks | None = None  # where it was asked for, and no filter searches for it
    slices: Slices | None = None  # where kernels read them, whose log-probabilities nobody knows


class Parts(NamedTuple):
    """What is known of the parts of rows, a mixture's members or the target, each [batch, rows, parts]."""

    masses: Tensor  # float64, of what is kept of this rank's tokens; -1 where there is no token on any rank
    whole: Tensor  # likewise, of all of its tokens, relative to what is kept of the row
    least: Tensor | None  # float32, the least logit that is kept; None: all
    largest: Tensor  # float64, the largest logit
    log_totals: Tensor  # float64, the logarithm of the mass, relative to that of the largest logit


class Members(NamedTuple):
    """The usable logits of all members, and how they are weighted."""

    logits: Tensor  # float64 [members, batch, rows, width]
    status: Tensor  # int64 [batch, rows], of the weighted members' slices
    weights: Tensor  # float64 [members, batch, 1]
    sampling: Parameters
    invalid: Tensor  # bool [batch]


def too_many(shard: Shard, sampling: SamplingArguments) -> Tensor | bool:
    """bool [batch]: whether a top-k exceeds what was said of all."""
    return False if sampling.top_ks is None or shard.max_top_k is None else sampling.top_ks > shard.max_top_k


def invalid_draft(shard: Shard, draft: Draft) -> Tensor:
    """bool [batch]: whether a sampling parameter of the draft is out of range."""
    return parameters(draft.sampling, draft.tokens).invalid | too_many(shard, draft.sampling)


def scores_need_no_sums(target: Target) -> bool:
    """Whether the best tokens need no probabilities: a lone model or a mixture of logits, without filters."""
    return target.ensemble != EnsembleKind.MIXTURE and (not target.sampling.filters or always_greedy(target))


def always_greedy(target: Target) -> bool:
    """Whether arguments alone say that every request is."""
    return target.sampling.temperatures is None and target.sampling.temperature == 0


def settings_of(shard: Shard, target: Target) -> tuple[Parameters, Tensor, Tensor]:
    """Sampling parameters, weights float64 [members, batch, 1], and what is out of range, bool [batch]."""
    first = target.member_logits[0]
    batch = first.shape[0]
    own = parameters(target.sampling, first)
    share = constants(target.weights, first.device).expand(batch, -1)
    if target.weight_rows is not None:
        share = target.weight_rows.double()
    invalid = own.invalid | invalid_weights(share, target.ensemble) | invalid_penalties(target.processing, first)
    invalid = invalid | too_many(shard, target.sampling)
    return own, torch.nan_to_num(share, nan=0.0, posinf=0.0, neginf=0.0).t()[..., None], invalid


def read_members(shard: Shard, target: Target, before: Tensor | Paths | None) -> Members:
    """What `ensemble_logprobs` makes of arguments, of this rank's slice."""
    first = target.member_logits[0]
    own, share, invalid = settings_of(shard, target)
    cleaned = [usable(shard, logits, target, before) for logits in target.member_logits]
    status = torch.zeros(first.shape[:2], dtype=torch.int64, device=first.device)
    for weight, (_, bits) in zip(share, cleaned):
        status = status | torch.where(weight != 0, bits, 0)
    return Members(torch.stack([values for values, _ in cleaned]), status, share, own, invalid)


def filter_of_target(shard: Shard, target: Target, own: Parameters) -> Filter | None:
    """What filters rows of the target, or of its members."""
    whole = target.ensemble == EnsembleKind.MIXTURE and not target.filter_members
    return filter_of(shard, target.sampling, own.filters, torch.float32 if whole else exact_type(target))


def filter_of_draft(shard: Shard, target: Target, draft: Draft, own: Parameters) -> Filter | None:
    edited = draft.processed and target.processing.active
    exact = None if edited else same_type(logits_of_drafters(target, draft))
    return filter_of(shard, draft.sampling, own.filters, exact)


def kernels_filter(kept: Filter | None, like: Tensor) -> bool:
    """Whether kernels can filter rows."""
    needed = [] if kept is None else ["buckets_of_shard", "largest_of_shard"]
    if kept is not None and kept.by_samples:
        needed.append("samples_of_shard")
    return all(local.operator_for(name, like) is not None for name in needed)


def kernels_read(shard: Shard, target: Target, *more: str) -> bool:
    """Whether kernels can read what probabilities of a target are made of. more: operators that are needed besides."""
    first = target.member_logits[0]
    kept = filter_of_target(shard, target, parameters(target.sampling, first))
    needed = ["chain_of_shard", "logprobs_of_shard", *more]
    return kernels_filter(kept, first) and all(local.operator_for(name, first) is not None for name in needed)


def operators_of(report: Report, scores: bool) -> list[str]:
    """What a report needs besides. scores: of rows that pick the token of the best score."""
    if report.logprobs == NO_LOGPROBS:
        return []
    return [*(["top_of_shard"] if report.top > 0 else []), *(["scores_of_shard"] if scores else [])]


OPERATORS_OF_RULES = {
    RuleKind.TYPICAL: ["entropies_of_shard"],
    RuleKind.GUMBEL: ["best_of_shard", "best_kept_of_shard"],
}


def kernels_verify(shard: Shard, target: Target, draft: Draft, kind: RuleKind, report: Report, *more: str) -> bool:
    """Whether kernels can read what drafts are verified by. draft: without its distribution where none is looked at."""
    if has_source(draft):
        kept = filter_of_draft(shard, target, draft, parameters(draft.sampling, draft.tokens))
        if not kernels_filter(kept, target.member_logits[0]):
            return False
    needed = [*operators_of(report, kind == RuleKind.GUMBEL), *OPERATORS_OF_RULES.get(kind, []), *more]
    return kernels_read(shard, target, *needed)


def without_source(draft: Draft) -> Draft:
    return draft._replace(logits=None, drafters=None, drafter=NO_DRAFTER)


def raw_slices(slices: Slices) -> Slices:
    """The rows of the raw ensemble, of a target that kernels have read."""
    return slices.of(raw(slices.target), drafted=False)


def masses_here(shard: Shard, rows: Rows) -> Tensor:
    """This rank's part of every row, float64 [batch, rows]; of greedy requests that kernels read any number."""
    if rows.slices is None:
        return probabilities(shard, rows).sum(-1)
    target = rows.slices.target
    if target.ensemble != EnsembleKind.MIXTURE:
        return rows.parts.masses[..., 0].clamp(min=0)
    _, weights, _ = settings_of(shard, target)
    masses = rows.parts.masses
    there = weights.permute(1, 2, 0) * (masses >= 0)
    own = (there * masses).sum(-1) / there.sum(-1)
    return torch.where(there.sum(-1) > 0, own, 0.0)


def members_of_slices(shard: Shard, target: Target, slices: Slices) -> Members:
    """The same where kernels read them."""
    own, share, invalid = settings_of(shard, target)
    return Members(slices.unknown.expand(len(share), -1, -1, -1), slices.status, share, own, invalid)


def mixed_steps(target: Target, members: Members) -> Steps[Tensor]:
    """Mixed logits [batch, rows, width] of a lone member or a mixture of logits; a collective for plausibility."""
    if target.plausibility == 0:
        return mixed_logits(members.logits, members.weights, 0.0)
    first, mixed = members.logits[0], mixed_logits(members.logits, members.weights, 0.0)
    heard = yield torch.cat([first.amax(-1), mixed.amax(-1)], 1)  # the second for ranks whose kernels need it
    least = heard.amax(0).chunk(2, 1)[0][..., None] + math.log(target.plausibility)
    return torch.where(first < least, -math.inf, mixed)


def exact_type(target: Target) -> torch.dtype | None:
    """Of what type all scores of a target, or of the members of a mixture, are, if its arguments say so."""
    mixed = target.ensemble == EnsembleKind.LOGIT_MIXTURE or target.processing.active
    return None if mixed else same_type(target.member_logits)


def same_type(logits: list[Tensor]) -> torch.dtype | None:
    types = {own.dtype for own in logits}
    return types.pop() if len(types) == 1 else None


def target_steps(
    shard: Shard,
    target: Target,
    before: Tensor | Paths | None,
    looked: Looked,
    picks: bool = False,
    slices: Slices | None = None,
    by_ranks: bool = False,
) -> Steps[Rows]:
    """The target distributions: a collective for a lone model or a mixture of logits, and what filters take.

    picks: whether the most likely tokens are looked at, also of requests that are not greedy.
    slices: where kernels have read the rows; what is looked up is the drafts.
    by_ranks: whether each rank's masses are asked for.
    """
    if slices is None:
        members = read_members(shard, target, before)
    else:
        members = members_of_slices(shard, target, slices)
    own = members.sampling
    kept, temperature = filter_of_target(shard, target, own), own.temperature
    by_ranks = by_ranks and (kept is None or kept.by_candidates)
    if target.ensemble != EnsembleKind.MIXTURE:
        if slices is None:
            scores = yield from mixed_steps(target, members)
        else:
            if target.plausibility > 0:
                written = yield from plausible_steps(slices)
                slices, temperature = slices.of(written), torch.ones_like(temperature)
            scores = slices.unknown
        given = members.status, looked.tokens, looked.rows
        source = Source(scores, temperature, *given, *of_slices(slices, kept), by_ranks)
        found = yield from softmax_steps(shard, source)
        status, parts = found.status, parts_of(found, 1)
    else:
        found, status, parts, slices = yield from mixture_steps(shard, target, members, looked, picks, slices, by_ranks)
    status = status | ~found.alive * Status.NO_TOKEN
    return Rows(*found[:5], status, own.greedy, members.invalid, parts, found.of_ranks, slices)


def of_slices(slices: Slices | None, kept: Filter | None) -> tuple[Filter | None, Here | None, SlicedRows | None]:
    """How the target's parts are filtered, and what kernels know of them: the end of a `Source`."""
    if slices is None:
        return kept, None, None
    return kept, slices.of_target(), None if kept is None else SlicedRows(slices, kept.keys, False)


def parts_of(found: Softmax, count: int) -> Parts:
    """Of rows of each part, one part after the other."""

    def by_row(values: Tensor) -> Tensor:
        return values.unflatten(1, (count, -1)).transpose(1, 2)

    least = None if found.least is None else by_row(found.least)
    return Parts(by_row(found.mass), by_row(found.whole), least, by_row(found.largest), by_row(found.log_total))


def places_of(slices: Slices, parts: Parts, rows: Tensor) -> Places:
    """Of rows int64 [batch, n] that nothing was drafted for."""
    shares = torch.ones_like(rows, dtype=torch.float64)
    masses = by_parts(parts.whole, shares[:, :0], -1.0)
    return Places(rows, shares, masses, least_of(parts.least, None, slices.numbers))


def reports_of(shard: Shard, rows: Rows) -> Reports:
    """What is reported of rows."""
    if rows.slices is None:
        return DenseReports(rows.logprobs, shard.start)
    return SlicedReports(rows.slices, *rows.parts[1:])


def direct_steps(
    shard: Shard,
    target: Target,
    before: Tensor | Paths | None,
    noise: Noise,
    count: int = 1,
    slices: Slices | None = None,
) -> Steps[tuple[Rows, Tensor]]:
    """The best tokens of each row, int64 [batch, rows, count], where nothing else is needed: 16 bytes a row and token.

    The rows' log-probabilities are not known. slices: where kernels have read rows of which plausible tokens count.
    """
    own, _, invalid = settings_of(shard, target)
    if slices is not None:
        target = yield from plausible_steps(slices)
        own = parameters(target.sampling, own.temperature)
    if has_kernel(target):
        found = best_in_parts(shard, target, before, own, noise, count)
    else:
        members = read_members(shard, target, before)
        scores = yield from mixed_steps(target, members)
        found = (*best_here(shard, scores, own.temperature, own.greedy, noise, count), members.status)
    bits = found[2] if slices is None else slices.status
    best = yield from winner_steps(*found[:2], own.temperature, own.greedy, noise, bits)
    first = best.tokens[..., 0]
    status = best.status | (first < 0) * Status.NO_TOKEN
    unknown = torch.zeros_like(first, dtype=torch.float64)
    nowhere = unknown[..., None] - torch.inf  # no slice of log-probabilities is known
    parts = Parts(nowhere, nowhere, None, nowhere, nowhere)
    rows = Rows(nowhere, unknown, first.clamp(min=0), unknown, first >= 0, status, own.greedy, invalid, parts)
    return rows, best.tokens


def best_in_parts(
    shard: Shard, target: Target, before: Tensor | Paths | None, own: Parameters, noise: Noise, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The logits of the best tokens of each row here, these, both [batch, rows, count], and the slice's status.

    A kernel reads from the first block of noise on that begins here; torch what lies before that, 127 tokens at most.
    """
    first, rest = split_at_block(shard, target, before)
    like = target.member_logits[0]
    values, tokens, status = [], [], torch.zeros(like.shape[:2], dtype=torch.int64, device=like.device)
    if first is not None:
        members = read_members(*first)
        scores = mixed_logits(members.logits, members.weights, 0.0)
        found = best_here(first.shard, scores, own.temperature, own.greedy, noise, count)
        values, tokens, status = [found[0]], [found[1]], members.status
    if rest is not None:
        seeds = None if noise.seeds is None else noise.seeds.contiguous()
        positions = None if noise.positions is None or seeds is None else noise.positions.contiguous()
        best = best_by_kernel(rest, seeds, positions, count)
        values.append(best.values)
        tokens.append(best.tokens.clamp(min=0) + rest.shard.start)
        status = status | best.status
    together = ranked(torch.cat(values, -1), torch.cat(tokens, -1), own.temperature, own.greedy, noise)
    return together[0][..., :count], together[1][..., :count].clamp(min=0), status


def sliced_best_steps(
    shard: Shard,
    before: Tensor | Paths | None,
    noise: Noise,
    rows: Rows,
    slices: Slices,
    reports: Reports | None,
    count: int = 1,
) -> Steps[Best]:
    """`best_steps` of rows that kernels have read.

    Where nothing is filtered, `best_in_parts` reads the slices once more, else the tiles that reach the threshold.
    """
    target, least, numbers = slices.target, rows.parts.least, slices.numbers
    if target.ensemble == EnsembleKind.MIXTURE:
        target, least = written_mixture(SlicedReports(slices, *rows.parts[1:])), None
    own = parameters(target.sampling, rows.status)
    index = torch.arange(rows.alive.shape[1], device=rows.alive.device).expand_as(rows.alive).contiguous()
    if least is None or noise.seeds is None or noise.positions is None:
        values, tokens, _ = best_in_parts(shard, target, before, own, noise, count)
    else:
        places = places_of(slices, rows.parts, index)
        values, tokens = best_kept(slices, places, noise.seeds, noise.positions, count)
        tokens = tokens.clamp(min=0) + shard.start
        if may_be_greedy(target):
            likely = numbers.largest[..., :1], numbers.tokens[..., None] + shard.start
            if count > 1:
                unfiltered = target._replace(sampling=without_filters(target.sampling))
                likely = best_in_parts(shard, unfiltered, before, own, noise, count)[:2]
            greedy = rows.greedy[:, None, None]
            values, tokens = torch.where(greedy, likely[0], values), torch.where(greedy, likely[1], tokens)
    of_tokens = None
    if reports is not None:
        own_tokens = shard.own(tokens).flatten(1)
        of_tokens = reports.at(index.repeat_interleave(count, 1), own_tokens).view(tokens.shape)
    return (yield from winner_steps(values, tokens, own.temperature, rows.greedy, noise, rows.status, of_tokens))


def probabilities(shard: Shard, rows: Rows) -> Tensor:
    """What this rank's tokens are emitted with, float64 [batch, rows, width]: one-hot for greedy requests."""
    first = one_hot(shard.own(rows.most_likely), rows.logprobs.shape[-1]) * rows.alive[..., None]
    return torch.where(rows.greedy[:, None, None], first, rows.logprobs.exp())


def first_if_greedy(shard: Shard, rows: Rows) -> Tensor:
    """Log-probabilities [batch, rows, width], where the most likely token of a greedy request is above all others.

    Rounding may have made ties.
    """
    first = one_hot(shard.own(rows.most_likely), rows.logprobs.shape[-1]) * rows.alive[..., None]
    return torch.where(rows.greedy[:, None, None] & (first > 0), 1.0, rows.logprobs)


def mixture_steps(
    shard: Shard, target: Target, members: Members, looked: Looked, picks: bool, slices: Slices | None, by_ranks: bool
) -> Steps[tuple[Softmax, Tensor, Parts, Slices | None]]:
    """A mixture of probabilities: a collective for its members, and one for the mixture if it must be looked at.

    And its status, and what is known of its members, or of the mixture, and the slices of these.
    """
    count, batch, rows, _ = members.logits.shape
    own, n = members.sampling, looked.tokens.shape[1]
    kept = filter_of_target(shard, target, own)
    index = torch.arange(count, device=looked.rows.device)[:, None] * rows
    source = Source(
        members.logits.transpose(0, 1).flatten(1, 2),
        own.temperature,
        members.status.repeat(1, count),
        looked.tokens.repeat(1, count),
        (looked.rows[:, None] + index).flatten(1),
        *of_slices(slices, kept if target.filter_members else None),
        by_ranks and not is_written(target, picks),
    )
    each = yield from softmax_steps(shard, source)
    status = each.status.view(batch, count, rows)[:, 0]
    alive = each.alive.view(batch, count, rows).transpose(0, 1)
    logprobs = each.logprobs.view(batch, count, rows, members.logits.shape[-1]).transpose(0, 1)
    mixed, shares = weighted(logprobs, members.weights, alive)
    looked_up = each.looked_up.view(batch, count, n).transpose(0, 1)
    of_rows = looked.rows.expand(count, -1, -1)
    looked_up = torch.logsumexp(looked_up + shares.gather(2, of_rows), 0).clamp(max=0)
    dead = ((members.weights != 0) & ~alive).any(0) & ((members.weights != 0) & alive).any(0)
    status = status | dead * Status.MEMBER_WITHOUT_TOKEN
    kept = None if target.filter_members else kept
    there = ((members.weights != 0) & alive).any(0)
    parts = parts_of(each, count)
    if not is_written(target, picks):
        nothing, unknown = torch.zeros_like(status), torch.zeros_like(mixed[..., 0])
        found = Softmax(mixed, looked_up, nothing, unknown, there, status, unknown, unknown, None, unknown, unknown)
        if each.of_ranks is not None:
            masses = each.of_ranks.masses.unflatten(2, (count, rows)) * shares.transpose(0, 1).exp()
            found = found._replace(of_ranks=each.of_ranks._replace(masses=masses.sum(2)))
        return found, status, parts, slices
    if kept is not None:
        mixed = mixed.float().double()  # as kernels write it: what is searched has float32 keys
    if slices is not None:
        slices = slices.of(written_mixture(SlicedReports(slices, *parts[1:])))
    plain, usual = torch.ones_like(own.temperature), torch.zeros_like(status)
    whole = Source(mixed, plain, usual, looked.tokens, looked.rows, *of_slices(slices, kept), by_ranks)
    found = yield from softmax_steps(shard, whole)
    return found, status, parts if slices is None else parts_of(found, 1), slices


def weighted(logprobs: Tensor, weights: Tensor, alive: Tensor) -> tuple[Tensor, Tensor]:
    """log sum_i weight_i exp(logprobs_i) of members [members, batch, rows, width] that have a token on some rank.

    And the logarithms of the weights that count, [members, batch, rows].
    """
    used = torch.where(alive & (weights != 0), weights, 0.0)
    shares = torch.nan_to_num(used.log() - used.sum(0).log(), nan=-math.inf, neginf=-math.inf)
    return torch.logsumexp(shares[..., None] + logprobs, 0).clamp(max=0), shares


class DraftRows(NamedTuple):
    """What draft tokens were drawn from. The same on all ranks, but for the first."""

    logprobs: Tensor  # float64 [batch, drafts, width]; of no meaning where it was not drawn
    looked_up: Tensor  # float64 [batch, n], log-probabilities
    drawn: Tensor  # bool [batch, drafts], False: one-hot at the token
    status: Tensor  # int64 [batch, drafts]
    masses: Tensor  # float64 [batch, drafts], of this rank's tokens over what is kept of the row; -1: one-hot
    least: Tensor | None  # float32 [batch, drafts], the least logit that is kept; None: all


def no_draft_rows(tokens: Tensor, looked: Looked, width: int) -> DraftRows:
    """Of drafts that were not drawn."""
    nothing = torch.zeros(1, dtype=torch.float64, device=tokens.device).expand(*tokens.shape, width)
    status = torch.zeros_like(tokens)
    looked_up = torch.zeros_like(looked.tokens, dtype=torch.float64)
    return DraftRows(
        nothing, looked_up, status.bool(), status, torch.full_like(status, -1.0, dtype=torch.float64), None
    )


def draft_steps(
    shard: Shard,
    target: Target,
    draft: Draft,
    greedy: Tensor,
    before: Tensor | Paths,
    looked: Looked,
    slices: Slices | None = None,
) -> Steps[DraftRows]:
    """What each draft token was drawn from; looked.rows: drafts. target: its logits and mask are of the drafts' rows.

    `specens_kernels.ops.verify_chain.reference.draft_rows` on a shard: a collective, and what filters take.
    """
    tokens = draft.tokens.long()
    if not has_source(draft):
        return no_draft_rows(tokens, looked, shard.width)
    edits = target if draft.processed else target._replace(allowed=None, processing=NO_PROCESSING)
    members = logits_of_drafters(target, draft)
    if slices is None:
        cleaned, here = [usable(shard, logits, edits, before) for logits in members], None
        scores, bits = cleaned[0]
    else:
        scores, bits, here = slices.unknown[:, : slices.draft_len], slices.draft_status, slices.of_drafts()
    known = given = torch.ones_like(tokens, dtype=torch.bool)
    if draft.drafters is not None:
        if slices is None:
            member = draft.drafters.long().clamp(0, len(members) - 1)[..., None]  # [batch, drafts, 1]
            stack = torch.stack([values for values, _ in cleaned], 2)
            scores = stack.gather(2, member[..., None].expand(-1, -1, -1, shard.width))[:, :, 0]
            bits = torch.stack([own for _, own in cleaned], 2).gather(2, member)[..., 0]
        given = draft.drafters != NO_DRAFTER
        known = (draft.drafters >= NO_DRAFTER) & (draft.drafters < len(members))
    own = parameters(draft.sampling, tokens)
    kept, rows = filter_of_draft(shard, target, draft, own), None
    if slices is not None and kept is not None:
        rows = SlicedRows(slices, kept.keys, True)
    source = Source(scores, own.temperature, bits, looked.tokens, looked.rows, kept, here, rows)
    found = yield from softmax_steps(shard, source)
    soft = given & ~(greedy | own.greedy | own.invalid)[:, None]
    usable_rows = known & found.alive
    status = torch.where(known, found.status, 0) | ~usable_rows * Status.INVALID_DRAFT_DISTRIBUTION
    drawn = soft & usable_rows
    masses = torch.where(drawn, found.whole, -1.0)
    return DraftRows(found.logprobs, found.looked_up, drawn, torch.where(soft, status, 0), masses, found.least)
