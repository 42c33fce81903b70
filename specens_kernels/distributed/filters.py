"""Filters of rows whose scores lie on several ranks: what is kept is found from candidates or sums of weights."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from specens_kernels.arguments import SamplingArguments
from specens_kernels.distributed.search import Tokens, find_key, first_of_search
from specens_kernels.distributed.shard import Shard
from specens_kernels.distributed.steps import Steps, together
from specens_kernels.ops.target_logprobs.reference import Filters
from specens_kernels.parts.written_tokens import Keys, WrittenTokens
from specens_kernels.values import fail

MOST_CANDIDATES = 1024  # of a rank: a top-k up to it is settled by the largest scores of each
UNLIMITED = 2**40  # a top-k that no vocabulary has


class Filter(NamedTuple):
    """Filters of a batch, and what arguments alone say of them, so that all ranks have the same collectives."""

    top_k: Tensor  # int64 [batch], 0 is off
    top_p: Tensor  # float64 [batch], 1 is off
    min_p: Tensor  # float64 [batch], 0 is off
    min_p_first: bool
    most: int  # that top_k is; 0: it is off for all
    always: bool  # it is on for every request that is filtered at all
    has_top_p: bool
    has_min_p: bool
    keys: Keys

    @property
    def candidates(self) -> int:
        """So many of a rank's largest scores are told."""
        return self.most if self.most <= MOST_CANDIDATES else 0

    @property
    def by_candidates(self) -> bool:
        """Whether these settle every request."""
        return self.candidates > 0 and self.always

    @property
    def by_samples(self) -> bool:
        """Whether keys of float32 are searched."""
        searches = self.has_top_p if self.candidates == 0 else self.has_top_p and not self.always
        return self.keys.bits == 32 and (searches or self.most > MOST_CANDIDATES)

    @property
    def without_top_k(self) -> Filter:
        return self._replace(most=0, top_k=torch.zeros_like(self.top_k))

    @property
    def cuts_first(self) -> bool:
        """Whether min-p comes before the others."""
        return self.has_min_p and self.min_p_first


def filter_of(
    shard: Shard, sampling: SamplingArguments, filters: Filters | None, exact: torch.dtype | None = None
) -> Filter | None:
    """None: nothing is filtered. filters: those of the parameters. exact: of what type all scores are, if they are."""
    if filters is None:
        return None
    most, always = _most_top_k(shard, sampling)
    has_top_p = sampling.top_ps is not None or sampling.top_p < 1
    has_min_p = sampling.min_ps is not None or sampling.min_p > 0
    dtype = exact if exact in (torch.bfloat16, torch.float16) else torch.float32
    keys = Keys(dtype, exact is not None, max(shard.vocab, shard.draft_size))
    return Filter(*filters, most, always, has_top_p, has_min_p, keys)


def _most_top_k(shard: Shard, sampling: SamplingArguments) -> tuple[int, bool]:
    """The most that top-k is, and whether it is always on."""
    vocab = max(shard.vocab, shard.draft_size)
    if sampling.top_ks is None:
        on = 0 < sampling.top_k < vocab
        return sampling.top_k if on else 0, on
    if not sampling.top_ks.is_cpu:
        if shard.max_top_k is None:
            fail("max_top_k", "the most that top_k is, which a tensor on a device does not tell", None)
        return min(shard.max_top_k, vocab), False
    most = int(sampling.top_ks.max()) if sampling.top_ks.numel() > 0 else 0
    if shard.max_top_k is not None and most > shard.max_top_k:
        fail("max_top_k", f"at least {most}, the most of top_k", shard.max_top_k)
    return max(min(shard.max_top_k or most, vocab), 0), bool((sampling.top_ks > 0).all())


class Least(NamedTuple):
    """What is kept: scores of at least both."""

    scaled: Tensor  # float64 [batch, rows], of scores over temperature, relative to the largest
    key: Tensor  # int64 [batch, rows]

    def keeps(self, scaled: Tensor, keys: Tensor) -> Tensor:
        """Of scores [batch, rows, n]."""
        return (scaled > -math.inf) & (scaled >= self.scaled[..., None]) & (keys >= self.key[..., None])

    def scores(self, order: Keys, largest: Tensor, temperature: Tensor) -> Tensor:
        """float32 [batch, rows], the least score that is kept."""
        largest_float = torch.finfo(torch.float32).max  # which an infinite logit counts as
        by_key = torch.where(self.key > 0, order.scores(self.key), -math.inf).clamp(max=largest_float)
        return torch.maximum(by_key, largest + self.scaled * temperature[:, None]).nan_to_num(nan=-math.inf).float()


def relative_to(scores: Tensor, largest: Tensor, temperature: Tensor) -> Tensor:
    """(scores - largest) / temperature, -inf where there is no token; scores [batch, rows, n]."""
    scaled = (scores - largest[..., None]) / temperature[:, None, None]
    return torch.where(scaled.isnan(), -math.inf, scaled)


class RowsHere(Protocol):
    """This rank's part of rows that are filtered."""

    def largest_scores(self, count: int) -> tuple[Tensor, Tensor]:
        """So many, float64 [batch, rows, count], -inf where there are fewer; and how often more the last one comes."""

    def weighed(self, largest: Tensor, least: Least | None) -> Tokens:
        """The masses, relative to that of `largest` [batch, rows], of what is kept; None: of all."""

    def counted(self, largest: Tensor, least: Least | None) -> Tokens:
        """The same, where each token counts 1."""


class DenseRows(NamedTuple):
    """Rows whose scores are written down."""

    scores: Tensor  # float64 [batch, rows, width]
    temperature: Tensor  # float64 [batch]
    order: Keys

    def largest_scores(self, count: int) -> tuple[Tensor, Tensor]:
        found = min(count, self.scores.shape[-1])
        values = self.scores.topk(found, -1).values
        last = values[..., -1:]
        ties = (self.scores == last).sum(-1) - (values == last).sum(-1)
        values = torch.nn.functional.pad(values, (0, count - found), value=-math.inf)
        return values, torch.where(last[..., 0] > -math.inf, ties, 0).double()[..., None]

    def _kept(self, largest: Tensor, least: Least | None) -> tuple[Tensor, Tensor, Tensor]:
        """Scores over temperature, keys, and which tokens are kept."""
        scaled, keys = relative_to(self.scores, largest, self.temperature), self.order.of(self.scores)
        return scaled, keys, scaled > -math.inf if least is None else least.keeps(scaled, keys)

    def weighed(self, largest: Tensor, least: Least | None) -> WrittenTokens:
        scaled, keys, kept = self._kept(largest, least)
        return WrittenTokens(keys, torch.where(kept, scaled.exp(), 0.0), self.temperature, largest)

    def counted(self, largest: Tensor, least: Least | None) -> WrittenTokens:
        _, keys, kept = self._kept(largest, least)
        return WrittenTokens(keys, kept.double(), None, None)


def first_of_filter(own: Filter, rows: RowsHere, largest: Tensor) -> list[Tensor]:
    """What a filter can tell before the largest score of all ranks is known: candidates, or what a search begins with.

    Each float64 [batch, rows, numbers]. largest: this rank's, float64 [batch, rows].
    """
    if own.candidates > 0:
        others = [] if own.always else first_of_filter(own.without_top_k, rows, largest)
        return [*rows.largest_scores(own.candidates), *others]
    if own.cuts_first or (own.most == 0 and not own.has_top_p):
        return []
    tokens = (rows.counted if own.most > 0 else rows.weighed)(largest, None)
    return first_of_search(own.keys, tokens, largest)


class FilteredRows(NamedTuple):
    """Rows whose largest scores, over all ranks, are known."""

    here: RowsHere
    temperature: Tensor  # float64 [batch]
    largest: Tensor  # float64 [batch, rows]
    total: Tensor  # float64 [batch, rows], mass over all ranks, relative to that of the largest
    ratios: Tensor  # float64 [ranks, batch, rows], by which what a rank has told of its masses is larger

    def mass(self, least: Least) -> Tensor:
        """Of what is kept here, float64 [batch, rows]."""
        return self.here.weighed(self.largest, least).total()


def filter_steps(own: Filter, rows: FilteredRows, told: list[Tensor]) -> Steps[tuple[Least, Tensor | None]]:
    """What is kept, and its mass relative to that of the largest score; None where that is still to be summed.

    told: what ranks have told of `first_of_filter`, each [ranks, batch, rows, numbers]. Requests with a top-k are
    settled by candidates, where these are told; the others are searched.
    """
    if own.candidates == 0:
        return (yield from search_steps(own, rows, told))
    has_top_k = (own.top_k > 0)[:, None]
    threshold, own_mass = by_candidates(own, rows, *told[:2])
    least = everything(rows)
    mass: Tensor | None = rows.total
    if not own.always:  # else those without one are greedy, and not filtered
        least, mass = yield from search_steps(own.without_top_k, rows, told[2:])
    least = Least(torch.where(has_top_k, threshold, least.scaled), torch.where(has_top_k, 0, least.key))
    return least, None if mass is None else torch.where(has_top_k, own_mass, mass)


def everything(rows: FilteredRows) -> Least:
    """The threshold that all tokens reach."""
    return Least(torch.full_like(rows.total, -math.inf), torch.zeros_like(rows.total, dtype=torch.int64))


def search_steps(own: Filter, rows: FilteredRows, told: list[Tensor]) -> Steps[tuple[Least, Tensor | None]]:
    """The same by sums of weights."""
    least, mass = everything(rows), rows.total
    log_min_p = own.min_p.log()[:, None].expand_as(rows.total)
    has_top_k, has_top_p = (own.top_k > 0)[:, None], (own.top_p < 1)[:, None]
    cuts_last, is_summed = own.has_min_p and not own.min_p_first, True
    if own.cuts_first:
        least, is_summed = least._replace(scaled=log_min_p), False
    if own.most > 0:
        count = torch.where(own.top_k > 0, own.top_k, UNLIMITED).double()[:, None].expand_as(rows.total)
        found = yield from find_key(own.keys, rows.here.counted(rows.largest, least), count, told, rows.total)
        least, is_summed, told = least._replace(key=torch.where(has_top_k, found.key, least.key)), False, []
    cut = torch.maximum(least.scaled, log_min_p) if cuts_last else least.scaled
    if not own.has_top_p:
        return least._replace(scaled=cut), mass if is_summed and not cuts_last else None
    if told:
        told = [told[0] * rows.ratios[..., None], *told[1:]]
    masses = rows.here.weighed(rows.largest, least)
    parts: list[Steps[Any]] = [find_key(own.keys, masses, own.top_p, told, rows.total)]
    if cuts_last:  # of two thresholds the one that keeps less
        parts.append(sum_steps(rows.mass(least._replace(scaled=cut))))
    found, *others = yield from together(*parts)
    mass = torch.where(has_top_p, found.weight, found.total)
    least = least._replace(key=torch.where(has_top_p, torch.maximum(found.key, least.key), least.key), scaled=cut)
    return least, torch.minimum(mass, others[0]) if others else mass


def sum_steps(told: Tensor) -> Steps[Tensor]:
    """The sum over all ranks, [batch, n]: a collective."""
    heard = yield told
    return heard.sum(0)


def by_candidates(own: Filter, rows: FilteredRows, values: Tensor, ties: Tensor) -> tuple[Tensor, Tensor]:
    """What is kept at least of requests that have a top-k, from the largest scores of each rank; and its mass.

    values: [ranks, batch, rows, candidates]. ties: [ranks, batch, rows, 1],
    how often more the last of them comes.
    """
    counts = torch.cat([torch.ones_like(values[..., 1:]), ties + 1], -1)
    values, order = values.movedim(0, 2).flatten(2).sort(dim=-1, descending=True)
    counts = counts.movedim(0, 2).flatten(2).gather(-1, order)  # [batch, rows, ranks * candidates]
    scaled = relative_to(values, rows.largest, rows.temperature)
    log_min_p = own.min_p.log()[:, None, None]
    counts = torch.where(scaled > -math.inf, counts, 0.0)
    if own.min_p_first:
        counts = torch.where(scaled >= log_min_p, counts, 0.0)
    wanted = torch.where(own.top_k > 0, own.top_k, UNLIMITED).double()[:, None, None]
    least = _lowest(scaled, counts, counts.cumsum(-1) - counts < wanted)
    counts = torch.where(scaled >= least[..., None], counts, 0.0)
    if own.has_top_p:
        masses = torch.where(counts > 0, counts * scaled.exp(), 0.0)
        top_p = own.top_p[:, None, None]
        inside = (masses.cumsum(-1) - masses < top_p * masses.sum(-1, keepdim=True)) | (top_p >= 1)
        least = _lowest(scaled, counts, inside)
    if not own.min_p_first:
        least = torch.maximum(least, log_min_p[..., 0].expand_as(least))
    counts = torch.where(scaled >= least[..., None], counts, 0.0)
    return least, torch.where(counts > 0, counts * scaled.exp(), 0.0).sum(-1)


def masses_of_ranks(
    own: Filter, rows: FilteredRows, least: Least, whole: Tensor, values: Tensor, ties: Tensor
) -> Tensor:
    """The masses of what is kept that each rank has, float64 [ranks, batch, rows]; of candidates as `by_candidates`.

    whole: those of all its tokens, which requests without a top-k keep.
    """
    counts = torch.cat([torch.ones_like(values[..., 1:]), ties + 1], -1)
    scaled = torch.stack([relative_to(own, rows.largest, rows.temperature) for own in values])
    kept = (scaled > -math.inf) & (scaled >= least.scaled[..., None])
    masses = torch.where(kept, counts * scaled.exp(), 0.0).sum(-1)
    return torch.where((own.top_k > 0)[:, None], masses, whole)


def _lowest(scaled: Tensor, counts: Tensor, inside: Tensor) -> Tensor:
    """The smallest of the values that are there and inside, [batch, rows]; -inf where none is."""
    smallest = torch.where((counts > 0) & inside, scaled, math.inf).amin(-1)
    return torch.where(smallest < math.inf, smallest, -math.inf)
