"""The definition of the target distribution, in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specens_kernels.arguments import NO_PROCESSING, SamplingArguments, Target, target_of
from specens_kernels.ensembles import WEIGHT_SUM_TOLERANCE, EnsembleKind
from specens_kernels.ops.target_logprobs.processing import (
    FLOAT_MAX,
    Paths,
    invalid_penalties,
    processed,
    request_values,
)
from specens_kernels.results import Status
from specens_kernels.sampling import LARGEST_TOP_P


def constants(numbers: Sequence[float], device: torch.device) -> Tensor:
    """float64 [n], written where it is wanted: a copy from the host could not be recorded in a CUDA graph."""
    if device.type == "cpu":
        return torch.tensor(numbers, dtype=torch.float64)
    return torch.stack([torch.full((), float(number), dtype=torch.float64, device=device) for number in numbers])


def clean(logits: Tensor) -> tuple[Tensor, Tensor]:
    """float64 logits with NaN as -inf and +inf as the largest float; status [...] of the rows."""
    status = torch.isnan(logits).any(-1) * Status.NAN_LOGITS + torch.isposinf(logits).any(-1) * Status.INFINITE_LOGITS
    return torch.nan_to_num(logits.double(), nan=-math.inf, posinf=FLOAT_MAX, neginf=-math.inf), status


def pad_vocab(values: Tensor, vocab: int, fill: float) -> Tensor:
    """Widen or cut the last dimension to vocab tokens."""
    values = values[..., :vocab]
    return torch.nn.functional.pad(values, (0, vocab - values.shape[-1]), value=fill)


def log_softmax(scores: Tensor) -> Tensor:
    """Log-softmax whose rows without a finite score are -inf throughout."""
    return torch.nan_to_num(torch.log_softmax(scores, -1), nan=-math.inf, neginf=-math.inf).clamp(max=0)


def at_temperature(scores: Tensor, temperature: Tensor) -> Tensor:
    """Scores [batch, steps, vocab] at a temperature [batch], however small or large; 0 at the largest of a row.

    They are log-probabilities but for a constant: subtracting that would round the scores of a large temperature alike.
    """
    shifted = (scores - scores.amax(-1, keepdim=True)) / temperature[:, None, None]
    return torch.where(shifted.isnan(), -math.inf, shifted)


class Filters(NamedTuple):
    """Filters of a batch, each [batch]; see `Sampling`."""

    top_k: Tensor  # int64, 0 is off
    top_p: Tensor  # float64, 1 is off
    min_p: Tensor  # float64, 0 is off
    min_p_first: bool


class Parameters(NamedTuple):
    """Sampling parameters of a batch, usable ones in the place of those out of range."""

    temperature: Tensor  # float64 [batch], the temperature, 1 for greedy requests
    greedy: Tensor  # bool [batch]
    filters: Filters | None  # None where no request may be filtered
    invalid: Tensor  # bool [batch], some parameter is out of range


def parameters(sampling: SamplingArguments, like: Tensor) -> Parameters:
    """like: any tensor [batch, ...]."""
    temperature = request_values(sampling.temperature, sampling.temperatures, like)
    top_k = request_values(sampling.top_k, sampling.top_ks, like).long()
    top_p = request_values(sampling.top_p, sampling.top_ps, like)
    min_p = request_values(sampling.min_p, sampling.min_ps, like)
    valid = torch.isfinite(temperature) & (temperature >= 0) & (top_p > 0) & (top_p <= 1) & (min_p >= 0) & (min_p <= 1)
    greedy = valid & (temperature == 0)
    off = greedy | ~valid
    top_p = torch.where(top_p > LARGEST_TOP_P, 1.0, top_p)
    first = bool(sampling.min_p_first)
    filters = Filters(torch.where(off, 0, top_k), torch.where(off, 1.0, top_p), torch.where(off, 0.0, min_p), first)
    return Parameters(torch.where(off, 1.0, temperature), greedy, filters if sampling.filters else None, ~valid)


def invalid_weights(weights: Tensor, ensemble: int) -> Tensor:
    """[batch]: weights [batch, members] that are not finite, or not a mixture's."""
    invalid = ~torch.isfinite(weights).all(-1)
    if ensemble == EnsembleKind.MIXTURE:
        invalid = invalid | (weights < 0).any(-1) | ((weights.sum(-1) - 1).abs() > WEIGHT_SUM_TOLERANCE)
    return invalid


def keep(scores: Tensor, kept: Tensor) -> Tensor:
    """The scores of the kept tokens."""
    return torch.where(kept, scores, -math.inf)


def top_k_filter(scores: Tensor, top_k: Tensor) -> Tensor:
    """Keep every token that is not below the k-th largest."""
    vocab = scores.shape[-1]
    rank = torch.where(top_k > 0, top_k, vocab).clamp(max=vocab)
    ordered = scores.sort(-1, descending=True).values
    kth = ordered.gather(-1, (rank - 1)[:, None, None].expand(*ordered.shape[:2], 1))
    return keep(scores, scores >= kth)


def top_p_filter(scores: Tensor, top_p: Tensor) -> Tensor:
    """Keep the smallest set of the most probable tokens whose mass reaches top_p, and all that tie with its last."""
    ordered = scores.sort(-1, descending=True).values
    before = (log_softmax(ordered).exp().cumsum(-1) < top_p[:, None, None]).sum(-1, keepdim=True)
    last = ordered.gather(-1, before.clamp(max=scores.shape[-1] - 1))
    return keep(scores, (scores >= last) | (top_p >= 1)[:, None, None])


def min_p_filter(scores: Tensor, min_p: Tensor) -> Tensor:
    """Keep every token with at least min_p times the largest probability."""
    return keep(scores, scores >= scores.amax(-1, keepdim=True) + min_p.log()[:, None, None])


def filtered(scores: Tensor, filters: Filters | None) -> Tensor:
    """Log-probabilities [batch, steps, vocab] after all filters, each on the one before, renormalised.

    scores: log-probabilities but for a constant of each row.
    """
    if filters is None:
        return log_softmax(scores)
    if filters.min_p_first:
        scores = min_p_filter(scores, filters.min_p)
    scores = top_p_filter(top_k_filter(scores, filters.top_k), filters.top_p)
    return log_softmax(scores if filters.min_p_first else min_p_filter(scores, filters.min_p))


def mixture_logprobs(logprobs: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """log sum_i weight_i exp(logprobs_i), over members that have a token; logprobs [members, batch, steps, vocab]."""
    alive = (logprobs.amax(-1) > -math.inf) & (weights != 0)  # [members, batch, steps]
    log_weights = torch.where(alive, weights, 0.0).log() - torch.where(alive, weights, 0.0).sum(0).log()
    log_weights = torch.nan_to_num(log_weights, nan=-math.inf, neginf=-math.inf)
    dead = ((weights != 0) & ~alive).any(0) & alive.any(0)
    mixed = torch.logsumexp(log_weights[..., None] + logprobs, 0).clamp(max=0)
    return mixed, dead * Status.MEMBER_WITHOUT_TOKEN


def mixed_logits(logits: Tensor, weights: Tensor, plausibility: float) -> Tensor:
    """sum_i weight_i logits_i with excluded tokens at -inf; logits [members, batch, steps, vocab]."""
    used = (weights != 0)[..., None]
    excluded = (used & (logits == -math.inf)).any(0)
    if plausibility > 0:
        excluded = excluded | (logits[0] < logits[0].amax(-1, keepdim=True) + math.log(plausibility))
    total = torch.where(used & (logits > -math.inf), weights[..., None] * logits, 0.0).sum(0)
    return torch.where(excluded, -math.inf, total)


class Distributions(NamedTuple):
    """Distributions of all rows, before greedy requests are made one-hot."""

    logprobs: Tensor  # float64 [batch, steps, vocab], filtered; unfiltered at temperature 1 for greedy requests
    most_likely: Tensor  # int64 [batch, steps], of the unfiltered ensemble at temperature 1
    greedy: Tensor  # bool [batch]
    invalid: Tensor  # bool [batch], a parameter is out of range
    status: Tensor  # int64 [batch, steps]


def ensemble_logprobs(target: Target, drafts: Tensor | Paths | None = None) -> Distributions:
    """The target distributions of member logits [batch, steps, vocab]; drafts [batch, n]: those before the rows."""
    first = target.member_logits[0]
    batch, steps = first.shape[:2]
    own = parameters(target.sampling, first)
    share = constants(target.weights, first.device).expand(batch, -1)
    if target.weight_rows is not None:
        share = target.weight_rows.double()
    invalid = own.invalid | invalid_weights(share, target.ensemble) | invalid_penalties(target.processing, first)
    share = torch.nan_to_num(share, nan=0.0, posinf=0.0, neginf=0.0).t()[..., None]  # [members, batch, 1]

    vocab = max(logits.shape[-1] for logits in target.member_logits)
    edits = target.processing, target.allowed, drafts
    cleaned = [clean(processed(logits, *edits)) for logits in target.member_logits]
    logits = torch.stack([pad_vocab(values, vocab, -math.inf) for values, _ in cleaned])
    status = torch.zeros(batch, steps, dtype=torch.int64, device=first.device)
    for weight, (_, bits) in zip(share, cleaned):
        status = status | torch.where(weight != 0, bits, 0)
    if target.ensemble == EnsembleKind.MIXTURE:
        members = [at_temperature(member, own.temperature) for member in logits]
        if target.filter_members:
            members = [filtered(member, own.filters) for member in members]
        logprobs, bits = mixture_logprobs(log_softmax(torch.stack(members)), share)
        status = status | bits
        most_likely = logprobs.argmax(-1)  # the filters of greedy requests are off
        if not target.filter_members:
            logprobs = filtered(logprobs, own.filters)
    else:
        mixed = mixed_logits(logits, share, target.plausibility)
        most_likely = mixed.argmax(-1)  # before rounding can make ties
        logprobs = filtered(at_temperature(mixed, own.temperature), own.filters)
    status = status | (logprobs.amax(-1) == -math.inf) * Status.NO_TOKEN
    return Distributions(logprobs, most_likely, own.greedy, invalid, status)


def one_hot(tokens: Tensor, vocab: int) -> Tensor:
    """float64 [..., vocab], all zero where the token is outside the vocabulary."""
    return (torch.arange(vocab, device=tokens.device) == tokens[..., None]).double()


def target_probs(rows: Distributions) -> Tensor:
    """What the emitted tokens are distributed as: one-hot at the most likely token for greedy requests."""
    alive = rows.logprobs.amax(-1, keepdim=True) > -math.inf
    most_likely = one_hot(rows.most_likely, rows.logprobs.shape[-1]) * alive
    return torch.where(rows.greedy[:, None, None], most_likely, rows.logprobs.exp())


def raw(target: Target) -> Target:
    """The ensemble of the logits as they are: temperature 1, no filters, no processing."""
    plain = SamplingArguments(None, None, None, None, 0, 0, 1.0, 1.0, 0.0)
    return target._replace(allowed=None, processing=NO_PROCESSING, sampling=plain, filter_members=0)


def target_logprobs(member_logits: list[Tensor], *, draft_tokens: Tensor | None = None, **options: Any) -> Tensor:
    """float32 [batch, steps, vocab]."""
    rows = ensemble_logprobs(target_of(member_logits, options), draft_tokens)
    most_likely = target_probs(rows).log()
    logprobs = torch.where(rows.greedy[:, None, None], most_likely, rows.logprobs)
    return torch.where(rows.invalid[:, None, None], -math.inf, logprobs).float()


def empty_logprobs(member_logits: list[Tensor], **_: Any) -> Tensor:
    """A tensor of the shape that `target_logprobs` gives, whose steps take a tracer long."""
    vocab = max(logits.shape[-1] for logits in member_logits)
    return member_logits[0].new_empty((*member_logits[0].shape[:-1], vocab), dtype=torch.float32)
