"""The distribution of rows whose scores lie on several ranks: normalised, filtered, looked up."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from specens_kernels.distributed.filters import (
    DenseRows,
    Filter,
    FilteredRows,
    RowsHere,
    filter_steps,
    first_of_filter,
    masses_of_ranks,
    relative_to,
    sum_steps,
)
from specens_kernels.distributed.shard import Shard
from specens_kernels.distributed.steps import Steps


class Here(NamedTuple):
    """What this rank tells of rows of scores."""

    largest: Tensor  # float64 [batch, rows]
    tokens: Tensor  # int64 [batch, rows], of the largest, as the shard counts them
    sums: Tensor  # float64 [batch, rows], of masses relative to it
    looked: Tensor  # float64 [batch, n], the scores of the looked up tokens


class Source(NamedTuple):
    """Rows of scores, of which the distribution is softmax(scores / temperature), filtered."""

    scores: Tensor  # float64 [batch, rows, width], -inf: no token
    temperature: Tensor  # float64 [batch]
    status: Tensor  # int64 [batch, rows], of this rank's slice
    tokens: Tensor  # int64 [batch, n], of the shard, to be looked up
    token_rows: Tensor  # int64 [batch, n]
    filter: Filter | None = None
    here: Here | None = None  # where it is known, and scores are not
    rows: RowsHere | None = None  # likewise, where they are filtered
    by_ranks: bool = False  # whether it is told where shards begin; not searched


class OfRanks(NamedTuple):
    """What each rank has of rows."""

    starts: Tensor  # float64 [ranks, batch], the first token
    masses: Tensor  # float64 [ranks, batch, rows]


class Softmax(NamedTuple):
    """The same on all ranks, but for the first."""

    logprobs: Tensor  # float64 [batch, rows, width], of this rank's tokens
    looked_up: Tensor  # float64 [batch, n], log-probabilities
    most_likely: Tensor  # int64 [batch, rows], of the whole vocabulary, before filters; the lowest id on a tie
    best: Tensor  # float64 [batch, rows], its log-probability
    alive: Tensor  # bool [batch, rows], whether there is a token
    status: Tensor  # int64 [batch, rows]
    mass: Tensor  # float64 [batch, rows], of what is kept of this rank's tokens; -1: no token on any rank
    whole: Tensor  # the same of all of its tokens, relative to what is kept of the row. Both where `here` was known
    least: Tensor | None  # float32 [batch, rows], the least score that is kept; None: all. Likewise
    largest: Tensor  # float64 [batch, rows], the largest score
    log_total: Tensor  # float64 [batch, rows], the logarithm of the mass, relative to that of the largest score
    of_ranks: OfRanks | None = None  # where it was asked for


def look_up(values: Tensor, source: Source) -> Tensor:
    """[batch, n]: the values [batch, rows, width] of the looked up tokens that lie here, -inf for others."""
    here = (source.tokens >= 0) & (source.tokens < values.shape[-1])
    request = torch.arange(values.shape[0], device=values.device)[:, None]
    return torch.where(here, values[request, source.token_rows, torch.where(here, source.tokens, 0)], -math.inf)


def by_rows(values: Tensor, source: Source) -> Tensor:
    """[batch, n]: the values [batch, rows] of the rows of the looked up tokens."""
    return values.gather(1, source.token_rows)


def softmax_steps(shard: Shard, source: Source) -> Steps[Softmax]:
    """Normalise, filter and look up: a collective, and as many as the filter takes."""
    scores, temperature = source.scores, source.temperature
    here = source.here
    if here is None:
        largest_here = scores.amax(-1)
        masses_here = relative_to(scores, largest_here, temperature).exp()
        here = Here(largest_here, scores.argmax(-1), masses_here.sum(-1), look_up(scores, source))
    told = [here.largest, (here.tokens + shard.start).double(), here.sums, source.status.double(), here.looked]
    of_filter, rows = [], source.rows
    if source.filter is not None:
        rows = DenseRows(scores, temperature, source.filter.keys) if rows is None else rows
        of_filter = first_of_filter(source.filter, rows, here.largest)
    told += [part.flatten(1) for part in of_filter]
    told += [here.sums.new_full((len(here.sums), 1), float(shard.start))] if source.by_ranks else []
    widths = [part.shape[1] for part in told]
    heard = yield torch.cat(told, 1)
    maxima, tokens, sums, status, looked_up, *more = heard.split(widths, 2)

    largest = maxima.amax(0)
    ratios = torch.nan_to_num(((maxima - largest) / temperature[:, None]).exp(), nan=0.0)  # [ranks, batch, rows]
    most_likely = torch.where(maxima == largest, tokens, math.inf).amin(0)
    scaled = relative_to(scores, largest, temperature)
    masses, starts = sums * ratios, more.pop() if source.by_ranks else None
    total = masses.sum(0)
    ratio = torch.nan_to_num(((here.largest - largest) / temperature[:, None]).exp(), nan=0.0)
    mass_here = torch.where(largest > -math.inf, here.sums * ratio / total, -1.0)
    looked = looked_up.amax(0)
    looked_scaled = (looked - by_rows(largest, source)) / temperature[:, None]
    looked_scaled = torch.where(looked_scaled.isnan(), -math.inf, looked_scaled)
    kept, kept_looked = scaled > -math.inf, looked > -math.inf
    lowest = None
    if source.filter is not None and rows is not None:
        filtered = FilteredRows(rows, temperature, largest, total, ratios)
        first = [part.view(len(heard), *own.shape) for part, own in zip(more, of_filter)]
        least, mass = yield from filter_steps(source.filter, filtered, first)
        kept = least.keeps(scaled, source.filter.keys.of(scores))
        kept_looked = kept_looked & (looked_scaled >= by_rows(least.scaled, source))
        kept_looked = kept_looked & (source.filter.keys.of(looked) >= by_rows(least.key, source))
        of_kept = filtered.mass(least) if mass is None or source.here is not None else mass
        if mass is None:
            mass = yield from sum_steps(of_kept)
        total = mass
        if source.by_ranks:
            masses = masses_of_ranks(source.filter, filtered, least, masses, *first[:2])
        if source.here is not None:
            mass_here = torch.where(largest > -math.inf, of_kept / total, -1.0)
            lowest = least.scores(source.filter.keys, largest, temperature)
    whole = mass_here if lowest is None else torch.where(largest > -math.inf, here.sums * ratio / total, -1.0)
    log_total = total.log()
    logprobs = torch.where(kept, scaled - log_total[..., None], -math.inf).clamp(max=0)
    looked_up = torch.where(kept_looked, looked_scaled - by_rows(log_total, source), -math.inf).clamp(max=0)
    alive = largest > -math.inf
    best = torch.where(alive, -log_total, -math.inf).clamp(max=0)
    most_likely, of_ranks = most_likely.nan_to_num(posinf=0).long(), None
    if starts is not None:
        of_ranks = OfRanks(starts[..., 0], torch.where(alive, masses / total, 0.0))
    return Softmax(
        logprobs,
        looked_up,
        most_likely,
        best,
        alive,
        union(status),
        mass_here,
        whole,
        lowest,
        largest,
        log_total,
        of_ranks,
    )


def union(status: Tensor) -> Tensor:
    """Bits that any rank has told, int64 [batch, rows]."""
    bits = status.long()
    total = bits[0]
    for own in bits[1:]:
        total = total | own
    return total
