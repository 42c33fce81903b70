"""Slices of chains and trees as C++ and Triton read them: once for what is told, and again the row of the next token.

What is kept of a pass goes from call to call; nobody but the operators looks into it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specens_kernels.arguments import NO_DRAFTER, Draft, SamplingArguments, Target
from specens_kernels.distributed import local
from specens_kernels.distributed.draw import NO_ID, Top
from specens_kernels.distributed.filters import Least
from specens_kernels.distributed.shard import Shard, shifted_mask
from specens_kernels.distributed.softmax import Here
from specens_kernels.ops.target_logprobs.reference import parameters
from specens_kernels.parts.written_tokens import DIGIT, Bracket, Keys

LEAST_MASS = 1e-300  # of a slice whose tokens have log-probabilities


class Numbers(NamedTuple):
    """Of each row's parts, those of the target and then the draft's: what `chain_of_shard` gives.

    The largest logit is -inf, and nothing is kept, where a part has no token or is not looked at.
    """

    largest: Tensor  # float64 [batch, steps, parts]
    sums: Tensor  # likewise, of powers relative to the largest
    tokens: Tensor  # int64 [batch, steps], the most likely one, of targets that are one softmax
    status: Tensor  # int32 [batch, steps, 2], of the target's logits and of the draft's
    looked: Tensor  # float64 [batch, draft_len, parts], the drafts' logits; of trees all nodes' in a draft's part
    state: Tensor  # float32 [batch, steps, parts, numbers]


class Slices:
    """The rows of a chain or a tree, read before they are filtered.

    tokens: the drafts, int64, as the shard counts them. parents: int64 like tokens, of trees; -2 for padding.
    """

    def __init__(
        self, shard: Shard, target: Target, draft: Draft, tokens: Tensor, parents: Tensor | None = None
    ) -> None:
        self.shard, self.target, self.draft = shard, target, draft
        target = target._replace(plausibility=0.0)  # all ranks together say what is plausible
        if target.allowed is not None:
            target = target._replace(allowed=shifted_mask(shard, target.allowed))
        target = target._replace(sampling=without_filters(target.sampling))
        draft = draft._replace(sampling=without_filters(draft.sampling))
        self.temperatures = target.sampling, draft.sampling
        self.start, self.draft_len, self.logits = shard.start, tokens.shape[1], target.member_logits
        self.tokens, self.parents = tokens.contiguous(), parents
        self.options = local.operator_options(target, draft)
        if parents is not None:
            self.options["parents"] = parents
        self.numbers = Numbers(*self.call("chain_of_shard"))

    def of(self, target: Target, drafted: bool = True) -> Slices:
        """The same rows of another target. drafted: beside what drafts were drawn from."""
        draft = self.draft if drafted else no_drafts(target, self.tokens)
        return Slices(self.shard, target, draft, self.tokens, self.parents)

    def call(self, name: str, *given: Any, **more: Any) -> Any:
        operator = local.operator_for(name, self.tokens)
        assert operator is not None
        return operator(self.logits, self.tokens, *given, **more, **self.options)

    @property
    def unknown(self) -> Tensor:
        """Scores [batch, steps, 1] in the place of those that nobody writes down."""
        return self.numbers.largest.new_full((*self.numbers.tokens.shape, 1), -math.inf)

    @property
    def nothing_left(self) -> Tensor:
        """The `residuals` of a row of each request that nothing is subtracted from, [batch, blocks]."""
        state = self.numbers.state
        return state.new_zeros(len(self.tokens), local.num_blocks(state), dtype=torch.float64)

    @property
    def status(self) -> Tensor:
        """int64 [batch, steps], of the target's slices."""
        return self.numbers.status[..., 0].long()

    @property
    def draft_status(self) -> Tensor:
        """int64 [batch, drafts], of those of what drafts were drawn from."""
        return self.numbers.status[:, : self.draft_len, 1].long()

    def of_target(self) -> Here:
        """The parts of the target, one after the other: [batch, parts * steps] of each, [batch, parts * drafts]."""
        parts = self.numbers.largest.shape[-1] - 1
        largest, sums, looked = (
            values[..., :parts].transpose(1, 2).flatten(1)
            for values in (self.numbers.largest, self.numbers.sums, self.numbers.looked)
        )
        return Here(largest, self.numbers.tokens.repeat(1, parts), sums, looked)

    def of_drafts(self) -> Here:
        """[batch, drafts] of each; of trees [batch, drafts * drafts], all nodes in what each was drawn from."""
        found, n = self.numbers, self.draft_len
        looked = found.looked[..., found.largest.shape[-1] - 1 :].flatten(1)
        return Here(found.largest[:, :n, -1], found.tokens[:, :n], found.sums[:, :n, -1], looked)


class Places(NamedTuple):
    """A row of each of n places of a request."""

    rows: Tensor  # int64 [batch, n]
    shares: Tensor  # float64 [batch, n], the target's part in what is left
    masses: Tensor  # float64 [batch, steps, parts], of the slices over that of what is kept of the row; < 0: no token
    least: Tensor | None  # float32 [batch, steps, parts], the logits that are kept; None: all
    offers: Tensor | None = None  # float64 [batch, drafts, 2] of trees: what `tree.SlicedShares` says of rejected nodes

    def call(self, slices: Slices, name: str, *given: Any) -> Any:
        more = {"least": self.least, "offers": self.offers}
        own = {key: value for key, value in more.items() if value is not None}
        return slices.call(name, *self[:3], slices.numbers.state, *given, **own)


def by_parts(target: Tensor, draft: Tensor, fill: float) -> Tensor:
    """[batch, steps, parts], of the target's parts [batch, steps, n] and of the drafts [batch, draft_len]."""
    missing = target.shape[1] - draft.shape[1]
    own = torch.nn.functional.pad(draft, (0, missing), value=fill)
    return torch.cat([target, own[..., None]], -1).contiguous()


def least_of(target: Tensor | None, draft: Tensor | None, numbers: Numbers) -> Tensor | None:
    """The least logits of `Places`, likewise; None: all are kept."""
    if target is None and draft is None:
        return None
    shape = numbers.largest.shape
    all_kept = torch.full((), -math.inf, dtype=torch.float32, device=numbers.largest.device)
    target = all_kept.expand(*shape[:2], shape[2] - 1) if target is None else target
    return by_parts(target, all_kept.expand(numbers.looked.shape[:2]) if draft is None else draft, -math.inf)


def entropies(slices: Slices, places: Places) -> Tensor:
    """This rank's part of the entropies of the target, float64 [batch, n]."""
    result: Tensor = places.call(slices, "entropies_of_shard")
    return result


def masses_of_drafts(slices: Slices, places: Places) -> Tensor:
    """This rank's part of what siblings before leave of what nodes were drawn from, float64 [batch, n]; rows: nodes."""
    result: Tensor = places.call(slices, "mass_of_drafts_of_shard")
    return result


def best_kept(slices: Slices, places: Places, seeds: Tensor, positions: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The logits of the tokens of the best scores of those that are kept, [batch, n, count], and these tokens.

    As the shard counts them, -1 where there are fewer, and of greedy requests.
    """
    given = seeds.contiguous(), positions.contiguous(), slices.start, count
    values, tokens = places.call(slices, "best_kept_of_shard", *given)
    return values, tokens


class SlicedReports(NamedTuple):
    """`Reports` of rows that kernels have read; what is known of their parts, each [batch, steps, parts]."""

    slices: Slices
    masses: Tensor  # float64, this rank's; negative: no token
    least: Tensor | None  # float32, the logits that are kept
    largest: Tensor  # float64, logits
    log_totals: Tensor  # float64, of the masses relative to those

    def _call(self, name: str, rows: Tensor, *given: Any) -> Any:
        there = torch.where(self.masses >= 0, self.masses.clamp(min=LEAST_MASS), -1.0)
        masses, *scale = (by_parts(own, own[:, :0, 0], -1.0) for own in (there, self.largest, self.log_totals))
        places = Places(rows.contiguous(), torch.ones_like(rows, dtype=torch.float64), masses, None)
        places = places._replace(least=least_of(self.least, None, self.slices.numbers))
        return places.call(self.slices, name, *scale, *given)

    def of_rows(self, rows: Tensor) -> Tensor:
        """The log-probabilities, float32 [batch, n, vocab], of rows int64 [batch, n]."""
        found: Tensor = self._call("logprobs_of_shard", rows)
        return found

    def of_row(self, row: Tensor) -> Tensor:
        return self.of_rows(row[:, None])[:, 0].double()

    def at(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """The log-probabilities of a token of each row, float64 [batch, n]; of those that lie elsewhere any."""
        found: Tensor = self._call("scores_of_shard", rows, tokens.contiguous())
        return found

    def top(self, rows: Tensor, count: int) -> Top:
        values, tokens = self._call("top_of_shard", rows, count)
        return Top(tokens + self.slices.start, values)


def residuals(slices: Slices, places: Places) -> Tensor:
    """The masses of max(share * target - draft, 0) in blocks of this rank's tokens, float64 [batch, n, blocks].

    Of trees what the rejected children of a row leave of it.
    """
    result: Tensor = places.call(slices, "residual_of_shard")
    return result


def exceeding(slices: Slices, places: Places, nodes: Tensor, ratios: Tensor) -> Tensor:
    """`Shares.exceeding` of rows of trees; the shares are their factors."""
    result: Tensor = places.call(slices, "exceeding_of_shard", nodes.contiguous(), ratios.contiguous())
    return result


def no_drafts(target: Target, tokens: Tensor) -> Draft:
    """Tokens of which nobody asks what they were drawn from."""
    return Draft(tokens, None, None, None, None, NO_DRAFTER, 0, 1, target.sampling)


def has_source(draft: Draft) -> bool:
    return draft.logits is not None or draft.drafters is not None or draft.drafter != NO_DRAFTER


def logits_of_drafters(target: Target, draft: Draft) -> list[Tensor]:
    """Those that drafts were drawn from: of one, or of all members where a tensor says whose."""
    if draft.logits is not None:
        return [draft.logits]
    return target.member_logits if draft.drafters is not None else [target.member_logits[draft.drafter]]


def without_filters(own: SamplingArguments) -> SamplingArguments:
    return SamplingArguments(own.temperatures, None, None, None, 0, 0, own.temperature, 1.0, 0.0)


class SlicedRows(NamedTuple):
    """The parts of a target, one after the other, or drafts, as `RowsHere` has rows."""

    slices: Slices
    order: Keys
    of_drafts: bool

    def call(self, name: str, *given: Any) -> Any:
        own = self.slices.numbers
        there = torch.where(own.largest > -math.inf, 1.0, -1.0).double().contiguous()
        return self.slices.call(name, there, own.state, self.of_drafts, *given)

    def largest_scores(self, count: int) -> tuple[Tensor, Tensor]:
        values, ties = self.call("largest_of_shard", count)
        return values, ties

    def weighed(self, largest: Tensor, least: Least | None) -> SlicedTokens:
        return SlicedTokens(self, largest, self._least(largest, least), False)

    def counted(self, largest: Tensor, least: Least | None) -> SlicedTokens:
        return SlicedTokens(self, largest, self._least(largest, least), True)

    def _least(self, largest: Tensor, least: Least | None) -> Tensor:
        if least is None:
            return torch.full_like(largest, -math.inf, dtype=torch.float32)
        return least.scores(self.order, largest, self.temperature)

    @property
    def temperature(self) -> Tensor:
        return parameters(self.slices.temperatures[self.of_drafts], self.slices.tokens).temperature


class SlicedTokens(NamedTuple):
    """Their tokens, as `Tokens` has them."""

    rows: SlicedRows
    largest: Tensor  # float64 [batch, rows], the logit that has the mass 1
    least: Tensor  # float32 [batch, rows], of the logits
    counts: bool

    def histogram(self, prefix: Tensor, shift: int) -> Tensor:
        half = self.rows.order.dtype == torch.float16
        given = (self.largest.contiguous(), self.least.contiguous(), prefix.contiguous(), shift, half, self.counts)
        sums: Tensor = self.rows.call("buckets_of_shard", *given)
        return sums

    @property
    def temperature(self) -> Tensor | None:
        return None if self.counts else self.rows.temperature

    def total(self) -> Tensor:
        return self.histogram(torch.zeros_like(self.largest, dtype=torch.int64), 2 * DIGIT)[..., 0]

    def samples(self, num: int, count: int) -> list[Tensor]:
        found: list[Tensor] = self._call("samples_of_shard", num, count)
        return found

    def entries(self, found: Bracket, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        where = (found.octave.contiguous(), found.low.contiguous(), found.high.contiguous())
        over, keys, repeats, weights = self._call("entries_of_shard", *where, count)
        return over, keys, repeats, weights

    def _call(self, name: str, *given: Any) -> Any:
        return self.rows.call(name, self.largest.contiguous(), self.least.contiguous(), self.counts, *given)


class SlicedChoice(NamedTuple):
    """A row of each request to draw a token from, as `draw.Choice` has it of rows that are written down."""

    slices: Slices
    places: Places  # one of each request
    blocks: Tensor  # float64 [batch, blocks], the residual's masses
    target: Tensor  # float64 [batch], the target's mass here
    subtracts: Tensor
    uniform: Tensor
    logprobs: Tensor | None  # float64 [batch, vocab], reported of the drawn token
    certain: Tensor  # int64 [batch], the token that a greedy request has; -1: it draws one

    def masses(self) -> tuple[Tensor, Tensor]:
        return self.blocks.sum(-1), self.target

    def reached(self, from_residual: Tensor, goal: Tensor) -> Tensor:
        own_mass = torch.where(from_residual, self.blocks.sum(-1), self.target)
        tokens = self.places.call(self.slices, "draw_of_shard", self.blocks, from_residual, goal)
        last = torch.where(tokens >= 0, tokens + self.slices.start, -1).double()
        found = torch.stack([torch.where((tokens >= 0) & (own_mass > goal), last, NO_ID), last], 1)
        certain = self.certain.double()[:, None]
        return torch.where(certain >= 0, certain, found)
