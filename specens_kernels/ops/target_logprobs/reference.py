"""The definition of the target distribution, in float64."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from specens_kernels.types import WEIGHT_SUM_TOLERANCE, EnsembleKind, Status

FLOAT_MAX = torch.finfo(torch.float32).max


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
    return torch.nan_to_num(torch.log_softmax(scores, -1), nan=-math.inf, neginf=-math.inf)


def request_values(number: float, rows: Tensor | None, batch: int, device: torch.device) -> Tensor:
    """A parameter as float64 [batch]."""
    return rows.double() if rows is not None else torch.full((batch,), number, dtype=torch.float64, device=device)


def invalid_temperature(temperature: Tensor) -> Tensor:
    return ~(torch.isfinite(temperature) & (temperature >= 0))


def invalid_weights(weights: Tensor, ensemble: int) -> Tensor:
    """[batch]: weights [batch, members] that are not finite, or not a mixture's."""
    invalid = ~torch.isfinite(weights).all(-1)
    if ensemble == EnsembleKind.MIXTURE:
        invalid = invalid | (weights < 0).any(-1) | ((weights.sum(-1) - 1).abs() > WEIGHT_SUM_TOLERANCE)
    return invalid


def mixture_logprobs(scores: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """log sum_i weight_i softmax(scores_i), over members that have a token; scores [members, batch, steps, vocab]."""
    alive = (scores.amax(-1) > -math.inf) & (weights != 0)  # [members, batch, steps]
    log_weights = torch.where(alive, weights, 0.0).log() - torch.where(alive, weights, 0.0).sum(0).log()
    log_weights = torch.nan_to_num(log_weights, nan=-math.inf, neginf=-math.inf)
    dead = ((weights != 0) & ~alive).any(0) & alive.any(0)
    return torch.logsumexp(log_weights[..., None] + log_softmax(scores), 0), dead * Status.MEMBER_WITHOUT_TOKEN


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

    logprobs: Tensor  # float64 [batch, steps, vocab], at temperature 1 for greedy requests
    greedy: Tensor  # bool [batch]
    invalid: Tensor  # bool [batch], a parameter is out of range
    status: Tensor  # int64 [batch, steps]


def ensemble_logprobs(
    member_logits: list[Tensor],
    ensemble: int,
    weights: list[float],
    weight_rows: Tensor | None,
    plausibility: float,
    temperature: float,
    temperatures: Tensor | None,
) -> Distributions:
    batch, steps = member_logits[0].shape[:2]
    device = member_logits[0].device
    heat = request_values(temperature, temperatures, batch, device)
    invalid = invalid_temperature(heat)
    greedy = heat == 0
    heat = torch.where(greedy | invalid, 1.0, heat)
    share = torch.tensor(weights, dtype=torch.float64, device=device).expand(batch, -1)
    if weight_rows is not None:
        share = weight_rows.double()
    invalid = invalid | invalid_weights(share, ensemble)
    share = torch.nan_to_num(share, nan=0.0, posinf=0.0, neginf=0.0).t()[..., None]  # [members, batch, 1]

    vocab = max(logits.shape[-1] for logits in member_logits)
    cleaned = [clean(logits) for logits in member_logits]
    logits = torch.stack([pad_vocab(values, vocab, -math.inf) for values, _ in cleaned])
    status = torch.zeros(batch, steps, dtype=torch.int64, device=device)
    for weight, (_, bits) in zip(share, cleaned):
        status = status | torch.where(weight != 0, bits, 0)
    if ensemble == EnsembleKind.LOGIT_MIXTURE:
        logprobs = log_softmax(mixed_logits(logits, share, plausibility) / heat[:, None, None])
    else:
        logprobs, bits = mixture_logprobs(logits / heat[:, None, None], share)
        status = status | bits
    status = status | (logprobs.amax(-1) == -math.inf) * Status.NO_TOKEN
    return Distributions(logprobs, greedy, invalid, status)


def one_hot(tokens: Tensor, vocab: int) -> Tensor:
    """float64 [..., vocab], all zero where the token is outside the vocabulary."""
    return (torch.arange(vocab, device=tokens.device) == tokens[..., None]).double()


def target_probs(rows: Distributions) -> Tensor:
    """What the emitted tokens are distributed as: one-hot at the most likely token for greedy requests."""
    alive = rows.logprobs.amax(-1, keepdim=True) > -math.inf
    most_likely = one_hot(rows.logprobs.argmax(-1), rows.logprobs.shape[-1]) * alive
    return torch.where(rows.greedy[:, None, None], most_likely, rows.logprobs.exp())


def target_logprobs(
    member_logits: list[Tensor],
    ensemble: int,
    weights: list[float],
    weight_rows: Tensor | None,
    plausibility: float,
    temperature: float,
    temperatures: Tensor | None,
) -> Tensor:
    """float32 [batch, steps, vocab]."""
    rows = ensemble_logprobs(member_logits, ensemble, weights, weight_rows, plausibility, temperature, temperatures)
    most_likely = target_probs(rows).log()
    logprobs = torch.where(rows.greedy[:, None, None], most_likely, rows.logprobs)
    return torch.where(rows.invalid[:, None, None], -math.inf, logprobs).float()
