"""Tokens from rows that lie on several ranks: by inverse CDF, of the best Gumbel scores, and what is told of them."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from specens_kernels.distributed.local import has_operators
from specens_kernels.distributed.shard import Shard
from specens_kernels.distributed.softmax import union
from specens_kernels.distributed.steps import Steps
from specens_kernels.ops.sample.gumbel import gumbel_noise, noise_of
from specens_kernels.rules import EMPTY_RESIDUAL_MASS

NO_ID = 2.0**40  # larger than any token
STATUS = 2**32  # a row's status is told in multiples of it, beside a token


class Drawn(NamedTuple):
    tokens: Tensor  # int64 [batch], -1 where no token has mass
    empty: Tensor  # bool [batch], the residual is nothing but rounding: drawn from the target


def draw_steps(shard: Shard, residual: Tensor, target: Tensor, subtracts: Tensor, uniform: Tensor) -> Steps[Drawn]:
    """Draw from the residual where it is asked for, else from the target: two collectives.

    The lowest token whose cumulative mass, over all shards in order, exceeds uniform * total mass. residual, target:
    masses float64 [batch, width]. subtracts: bool [batch]. uniform: float64 [batch].
    """
    start = torch.full_like(uniform, float(shard.start))
    heard = yield torch.stack([start, residual.sum(-1), target.sum(-1)], 1)
    starts, residuals, targets = heard.unbind(-1)  # [ranks, batch]
    empty = subtracts & (residuals.sum(0) <= EMPTY_RESIDUAL_MASS) & (targets.sum(0) > 0)
    from_residual = subtracts & ~empty
    masses = torch.where(from_residual[:, None], residual, target)
    totals = torch.where(from_residual, residuals, targets)
    before = torch.where(starts < shard.start, totals, 0.0).sum(0)
    has_mass = masses > 0
    reached = has_mass & (before[:, None] + masses.cumsum(-1) > (uniform * totals.sum(0))[:, None])
    tokens = torch.arange(shard.start, shard.start + masses.shape[-1], device=masses.device).double()
    first = torch.where(reached, tokens, NO_ID).amin(-1)
    last = torch.where(has_mass, tokens, -1.0).amax(-1)  # where rounding reaches none
    heard = yield torch.stack([first, last], 1)
    first, last = heard[..., 0].amin(0), heard[..., 1].amax(0)
    return Drawn(torch.where(first < NO_ID, first, last).long(), empty)


class Noise(NamedTuple):
    """Where the Gumbel noise of rows comes from; None: every request is greedy."""

    seeds: Tensor | None  # int64 [batch]
    positions: Tensor | None  # int64 [batch, rows], of each row's own token


class Best(NamedTuple):
    tokens: Tensor  # int64 [batch, rows, count], best first, then -1
    status: Tensor  # int64 [batch, rows]


def best_steps(
    shard: Shard, scores: Tensor, temperature: Tensor | None, greedy: Tensor, noise: Noise, count: int, status: Tensor
) -> Steps[Best]:
    """The tokens of the best scores / temperature + noise, the lowest id on a tie: a collective of 16 bytes a row.

    Each rank tells its best tokens with their scores as they are, to which every rank adds the noise again: so nothing
    is rounded that the whole row would not round. scores: float64 [batch, rows, width]. Greedy requests have no noise.
    """
    values, tokens = best_here(shard, scores, temperature, greedy, noise, count)
    return (yield from winner_steps(values, tokens, temperature, greedy, noise, status))


def best_here(
    shard: Shard, scores: Tensor, temperature: Tensor | None, greedy: Tensor, noise: Noise, count: int
) -> tuple[Tensor, Tensor]:
    """The best tokens of this rank's slice and their scores as they are, each [batch, rows, count]."""
    here = _with_noise(scores, temperature, greedy, noise, shard.start)
    if count == 1:
        best = here.argmax(-1, keepdim=True)
    else:
        best = here.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    missing = (0, count - best.shape[-1])
    values = torch.nn.functional.pad(scores.gather(-1, best), missing, value=-math.inf)
    return values, torch.nn.functional.pad(best + shard.start, missing)


def ranked(
    values: Tensor, tokens: Tensor, temperature: Tensor | None, greedy: Tensor, noise: Noise
) -> tuple[Tensor, Tensor]:
    """Candidates [batch, rows, n] with their scores as they are, best first, the lowest id on a tie; -1 for none."""
    tokens, order = tokens.sort(dim=-1)
    values = values.gather(-1, order)
    scored = _with_noise(values, temperature, greedy, noise, tokens)
    scored, order = scored.sort(dim=-1, descending=True, stable=True)
    return values.gather(-1, order), torch.where(scored > -math.inf, tokens.gather(-1, order), -1)


def winner_steps(
    values: Tensor, tokens: Tensor, temperature: Tensor | None, greedy: Tensor, noise: Noise, status: Tensor
) -> Steps[Best]:
    """Of the candidates of all ranks, [batch, rows, count] of each, the best."""
    batch, rows, count = values.shape
    told = torch.stack([values, (tokens + status[..., None] * STATUS).double()], -1)
    heard = yield told.flatten(1)
    heard = heard.view(len(heard), batch, rows, count, 2)
    codes = heard[..., 1].long()
    all_values, all_tokens = (part.movedim(0, 2).flatten(2) for part in (heard[..., 0], codes % STATUS))
    _, best = ranked(all_values, all_tokens, temperature, greedy, noise)  # of [batch, rows, ranks * count]
    return Best(best[..., :count], union(codes[..., 0] // STATUS))


def _with_noise(
    scores: Tensor, temperature: Tensor | None, greedy: Tensor, noise: Noise, tokens: int | Tensor
) -> Tensor:
    """Scores relative to the row's largest, over temperature, with noise. tokens: the first one, or each."""
    scaled = scores - scores.amax(-1, keepdim=True)
    if temperature is not None:
        scaled = scaled / torch.where(greedy, 1.0, temperature)[:, None, None]
    scaled = torch.where(scaled.isnan(), -math.inf, scaled)
    if noise.seeds is None or noise.positions is None:
        return scaled
    own = noise_of_tokens(noise.seeds, noise.positions, tokens, scores)
    return scaled + torch.where(greedy[:, None, None], 0.0, own)


def noise_of_tokens(seeds: Tensor, positions: Tensor, tokens: int | Tensor, like: Tensor) -> Tensor:
    """The Gumbel noise of tokens, float64 [batch, rows, n], by the C++ on the CPU. tokens: the first one, or each."""
    if has_operators(like):
        if isinstance(tokens, int):
            tokens = torch.arange(tokens, tokens + like.shape[-1]).expand_as(like)
        return torch.ops.specens.gumbel_noise(seeds, positions, tokens.contiguous())
    seeds = seeds[:, None].expand_as(positions)
    if isinstance(tokens, int):
        return gumbel_noise(seeds, positions, like.shape[-1], tokens)
    return noise_of(seeds, positions, tokens)


def report_steps(shard: Shard, logprobs: Tensor, rows: Tensor, emitted: Tensor, count: int) -> Steps[list[Tensor]]:
    """What is told of emitted tokens [batch, columns], -1 for none, as `most_likely` tells it: a collective.

    logprobs: float64 [batch, rows, width]. rows: int64 [batch, columns], where each was drawn.
    """
    batch, columns = emitted.shape
    own = shard.own(emitted)
    here = (own >= 0) & (own < logprobs.shape[-1])
    request = torch.arange(batch, device=emitted.device)[:, None]
    values = (
        logprobs[request, rows.clamp(0, logprobs.shape[1] - 1)]
        if logprobs.shape[1] > 0
        else logprobs.new_full((batch, columns, logprobs.shape[-1]), -math.inf)
    )
    chosen = torch.where(here, values.gather(-1, torch.where(here, own, 0)[..., None])[..., 0], -math.inf)
    ordered, tokens = values.sort(dim=-1, descending=True, stable=True)
    missing = max(0, count - ordered.shape[-1])
    ordered = torch.nn.functional.pad(ordered[..., :count], (0, missing), value=-math.inf)
    tokens = torch.nn.functional.pad(tokens[..., :count] + shard.start, (0, missing))
    told = torch.cat([chosen[..., None], ordered, tokens.double()], -1)
    heard = yield told.flatten(1)
    heard = heard.view(len(heard), batch, columns, 1 + 2 * count)
    is_emitted = emitted >= 0
    reported = [torch.where(is_emitted, heard[..., 0].amax(0), 0.0).float()]
    if count == 0:
        return reported
    values = heard[..., 1 : 1 + count].movedim(0, 2).flatten(2)
    tokens, order = heard[..., 1 + count :].movedim(0, 2).flatten(2).sort(dim=-1)
    values, best = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    values = torch.where(is_emitted[..., None], values[..., :count], -math.inf)
    tokens = torch.where(values > -math.inf, tokens.gather(-1, best)[..., :count].long(), -1)
    return [*reported, tokens, values.float()]
