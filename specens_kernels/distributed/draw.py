"""Tokens from rows that lie on several ranks: by inverse CDF, of the best Gumbel scores, and what is told of them."""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from specens_kernels.distributed.local import has_operators
from specens_kernels.distributed.shard import Shard
from specens_kernels.distributed.softmax import OfRanks, union
from specens_kernels.distributed.steps import Steps
from specens_kernels.ops.sample.gumbel import gumbel_noise, noise_of
from specens_kernels.ops.verify_chain.reference import pick_row
from specens_kernels.rules import EMPTY_RESIDUAL_MASS

NO_ID = 2.0**40  # larger than any token
STATUS = 2**32  # a row's status is told in multiples of it, beside a token


class Drawn(NamedTuple):
    tokens: Tensor  # int64 [batch], -1 where no token has mass
    empty: Tensor  # bool [batch], the residual is nothing but rounding: drawn from the target
    logprobs: Tensor  # float64 [batch], of the tokens, where they are reported


class Choice(NamedTuple):
    """A row of each request to draw a token from, of this rank's tokens."""

    residual: Tensor  # masses float64 [batch, width]
    target: Tensor  # likewise
    subtracts: Tensor  # bool [batch], draw from the residual
    uniform: Tensor  # float64 [batch]
    logprobs: Tensor | None  # float64 [batch, width], reported of the drawn token; None: nothing is reported
    start: int  # the shard's first token

    def masses(self) -> tuple[Tensor, Tensor]:
        """Of the residual and of the target, float64 [batch] each."""
        return self.residual.sum(-1), self.target.sum(-1)

    def reached(self, from_residual: Tensor, goal: Tensor) -> Tensor:
        """float64 [batch, 2]: the first token whose cumulative mass here exceeds the goal, else NO_ID.

        And the last one with mass, else -1.
        """
        masses = torch.where(from_residual[:, None], self.residual, self.target)
        has_mass = masses > 0
        exceeds = has_mass & (masses.cumsum(-1) > goal[:, None])
        tokens = torch.arange(self.start, self.start + masses.shape[-1], device=masses.device).double()
        first = torch.where(exceeds, tokens, NO_ID).amin(-1)
        last = torch.where(has_mass, tokens, -1.0).amax(-1)  # where rounding reaches none
        return torch.stack([first, last], 1)


class Drawable(Protocol):
    """What `Choice` tells, however its rows are read."""

    @property
    def subtracts(self) -> Tensor: ...
    @property
    def uniform(self) -> Tensor: ...
    @property
    def logprobs(self) -> Tensor | None: ...
    def masses(self) -> tuple[Tensor, Tensor]: ...
    def reached(self, from_residual: Tensor, goal: Tensor) -> Tensor: ...


class Masses(NamedTuple):
    """The masses of all ranks, of the rows that a token may be drawn from."""

    starts: Tensor  # float64 [ranks, batch], the first token of each
    residual: Tensor  # float64 [ranks, batch, rows], or [ranks, batch]
    target: Tensor  # likewise; where residuals have fewer rows, nothing is subtracted from the others

    @classmethod
    def of_target(cls, known: OfRanks) -> Masses:
        """Where nothing is subtracted."""
        return cls(known.starts, known.masses[..., :0], known.masses)

    def at(self, row: Tensor) -> Masses:
        """Those of one row of each request, int64 [batch]; zero where it is not there."""
        return Masses(self.starts, _at_row(self.residual, row), _at_row(self.target, row))


def _at_row(values: Tensor, row: Tensor) -> Tensor:
    padded = torch.nn.functional.pad(values, (0, 1))
    return padded.gather(-1, row.clamp(max=values.shape[-1]).expand(len(values), -1)[..., None])[..., 0]


def mass_steps(shard: Shard, residual: Tensor, target: Tensor, *more: Tensor) -> Steps[tuple[Masses, Tensor]]:
    """Masses of this rank [batch, rows] of each to those of all ranks, and more [batch, n] to its sum: a collective."""
    start = target.new_full((len(target), 1), float(shard.start))
    heard = yield torch.cat([start, residual, target, *more], 1)
    widths = (1, residual.shape[1], target.shape[1])
    starts, residuals, targets, others = heard.split((*widths, heard.shape[-1] - sum(widths)), -1)
    return Masses(starts[..., 0], residuals, targets), others.sum(0)


def draw_steps(shard: Shard, choice: Drawable, masses: Masses | None = None) -> Steps[Drawn]:
    """Draw from the residual where it is asked for, else from the target: two collectives.

    The lowest token whose cumulative mass, over all shards in order, exceeds uniform * total mass. masses: those of the
    rows, where ranks have told them, which leaves one collective.
    """
    subtracts, uniform, logprobs = choice.subtracts, choice.uniform, choice.logprobs
    if masses is None:
        told, _ = yield from mass_steps(shard, *(own[:, None] for own in choice.masses()))
        masses = told.at(torch.zeros_like(subtracts, dtype=torch.int64))
    starts, residuals, targets = masses
    empty = subtracts & (residuals.sum(0) <= EMPTY_RESIDUAL_MASS) & (targets.sum(0) > 0)
    from_residual = subtracts & ~empty
    totals = torch.where(from_residual, residuals, targets)
    before = torch.where(starts < shard.start, totals, 0.0).sum(0)
    own = choice.reached(from_residual, uniform * totals.sum(0) - before)
    reports = [] if logprobs is None else [_at_tokens(logprobs, own - shard.start)]
    heard = yield torch.cat([own, *reports], 1)
    first, last = heard[..., 0].amin(0), heard[..., 1].amax(0)
    drawn = torch.where(first < NO_ID, first, last)
    if logprobs is None:
        return Drawn(drawn.long(), empty, uniform)
    of_token = torch.where(heard[..., :2] == drawn[:, None], heard[..., 2:], -math.inf)
    return Drawn(drawn.long(), empty, of_token.amax((0, 2)))


def _at_tokens(values: Tensor, tokens: Tensor) -> Tensor:
    """values[..., tokens], [..., n] of each, -inf where a token lies elsewhere."""
    here = (tokens >= 0) & (tokens < values.shape[-1])
    return torch.where(here, values.gather(-1, torch.where(here, tokens, 0).long()), -math.inf)


class Noise(NamedTuple):
    """Where the Gumbel noise of rows comes from; None: every request is greedy."""

    seeds: Tensor | None  # int64 [batch]
    positions: Tensor | None  # int64 [batch, rows], of each row's own token


class Best(NamedTuple):
    tokens: Tensor  # int64 [batch, rows, count], best first, then -1
    status: Tensor  # int64 [batch, rows]
    logprobs: Tensor  # float64 [batch, rows, count], of the tokens, where they are reported


def best_steps(
    shard: Shard, scores: Tensor, greedy: Tensor, noise: Noise, count: int, status: Tensor, logprobs: Tensor | None
) -> Steps[Best]:
    """The tokens of the best scores + noise, the lowest id on a tie: a collective of 16 bytes a row.

    Each rank tells its best tokens with their scores as they are, to which every rank adds the noise again: so nothing
    is rounded that the whole row would not round. scores: float64 [batch, rows, width]. Greedy requests have no noise.
    logprobs: float64 [batch, rows, width], reported of the tokens: 8 bytes more.
    """
    values, tokens = best_here(shard, scores, None, greedy, noise, count)
    of_tokens = None if logprobs is None else _at_tokens(logprobs, tokens - shard.start)
    return (yield from winner_steps(values, tokens, None, greedy, noise, status, of_tokens))


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
    values: Tensor,
    tokens: Tensor,
    temperature: Tensor | None,
    greedy: Tensor,
    noise: Noise,
    status: Tensor,
    logprobs: Tensor | None = None,
) -> Steps[Best]:
    """Of the candidates of all ranks, [batch, rows, count] of each, the best; logprobs: what is reported of them."""
    count = values.shape[-1]
    reports = [] if logprobs is None else [logprobs]
    told = torch.stack([values, (tokens + status[..., None] * STATUS).double(), *reports], -1)
    heard = yield told.flatten(1)
    heard = heard.view(len(heard), *told.shape)
    codes = heard[..., 1].long()
    all_values, all_tokens = (part.movedim(0, 2).flatten(2) for part in (heard[..., 0], codes % STATUS))
    _, best = ranked(all_values, all_tokens, temperature, greedy, noise)  # of [batch, rows, ranks * count]
    best, own_status = best[..., :count], union(codes[..., 0] // STATUS)
    if logprobs is None:
        return Best(best, own_status, torch.zeros_like(best, dtype=torch.float64))
    of_all = heard[..., 2].movedim(0, 2).flatten(2)[..., None, :]
    same = all_tokens[..., None, :] == best[..., None]
    return Best(best, own_status, torch.where(same, of_all, -math.inf).amax(-1))


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


class Reports(Protocol):
    """What is reported of this rank's tokens."""

    def of_row(self, row: Tensor) -> Tensor:
        """The log-probabilities [batch, width] of a row of each request, int64 [batch]."""

    def at(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """The log-probabilities of a token of each row, both int64 [batch, n], -inf where it lies elsewhere."""

    def top(self, rows: Tensor, count: int) -> Top:
        """The likeliest tokens of rows int64 [batch, columns], in their order; any where fewer have mass."""


class DenseReports(NamedTuple):
    """Of log-probabilities that are written down."""

    logprobs: Tensor  # float64 [batch, rows, width]
    start: int  # the shard's first token

    def of_row(self, row: Tensor) -> Tensor:
        return pick_row(self.logprobs, row)

    def at(self, rows: Tensor, tokens: Tensor) -> Tensor:
        return _at_tokens(self._of_rows(rows), tokens[..., None])[..., 0]

    def _of_rows(self, rows: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(self.logprobs, (0, 0, 0, 1), value=-math.inf)
        request = torch.arange(len(rows), device=rows.device)[:, None]
        return padded[request, rows.clamp(max=self.logprobs.shape[1])]

    def top(self, rows: Tensor, count: int) -> Top:
        own = self._of_rows(rows)
        ordered, tokens = own.sort(dim=-1, descending=True, stable=True)
        missing = (0, max(0, count - ordered.shape[-1]))
        ordered = torch.nn.functional.pad(ordered[..., :count], missing, value=-math.inf)
        return Top(torch.nn.functional.pad(tokens[..., :count] + self.start, missing), ordered)


class Top(NamedTuple):
    """The likeliest tokens of rows, most likely first, the lowest id on a tie; -1 and -inf where fewer have mass."""

    tokens: Tensor  # int64 [batch, columns, count]
    logprobs: Tensor  # float64 likewise


def top_steps(reports: Reports, rows: Tensor, count: int) -> Steps[Top]:
    """Of rows int64 [batch, columns]: a collective, unless count is 0."""
    shape = (*rows.shape, count)
    if count == 0:
        return Top(rows.new_zeros(shape), rows.new_zeros(shape, dtype=torch.float64))
    own = reports.top(rows, count)
    heard = yield torch.stack([own.logprobs, own.tokens.double()], -1).flatten(1)
    values, ids = heard.view(len(heard), *shape, 2).movedim(0, 2).flatten(2, 3).unbind(-1)
    ids, order = ids.sort(dim=-1)
    values, best = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    values = values[..., :count]
    return Top(torch.where(values > -math.inf, ids.gather(-1, best)[..., :count].long(), -1), values)


def picked_steps(shard: Shard, tokens: Tensor, known: Tensor | None, logprobs: Tensor | None) -> Steps[Drawn]:
    """What requests pick, int64 [batch], -1 for nothing, with its reported log-probabilities.

    known: these [batch], where ranks have told them. logprobs: float64 [batch, width], reported of the tokens of each
    row, where they are else looked up: a collective; None: nothing is reported.
    """
    if known is None and logprobs is not None:
        heard = yield _at_tokens(logprobs, shard.own(tokens)[:, None])
        known = heard.amax(0)[:, 0]
    nothing = torch.zeros_like(tokens, dtype=torch.bool)
    return Drawn(tokens, nothing, nothing.double() if known is None else known)


def reported(chosen: Tensor, emitted: Tensor, top: Top) -> list[Tensor]:
    """What is told of emitted tokens [batch, columns], -1 for none, as `most_likely` tells it.

    chosen: their log-probabilities. top: of rows of theirs, or of one.
    """
    there = emitted >= 0
    own = torch.where(there, chosen, 0.0).float()
    if top.tokens.shape[-1] == 0:
        return [own]
    there = there[:, : top.tokens.shape[1], None]
    return [own, torch.where(there, top.tokens, -1), torch.where(there, top.logprobs, -math.inf).float()]
