"""A chain's slices as C++ and Triton read them: once for what is told, and again only the row of the next token.

What is kept of a pass goes from call to call; nobody but the operators looks into it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specens_kernels.arguments import Draft, Target
from specens_kernels.distributed import local
from specens_kernels.distributed.draw import NO_ID
from specens_kernels.distributed.shard import Shard, shifted_mask
from specens_kernels.distributed.softmax import Here


class Numbers(NamedTuple):
    """Of each row's parts, those of the target and then the draft's: what `chain_of_shard` gives.

    The largest logit is -inf, and nothing is kept, where a part has no token or is not looked at.
    """

    largest: Tensor  # float64 [batch, steps, parts]
    sums: Tensor  # likewise, of powers relative to the largest
    tokens: Tensor  # int64 [batch, steps], the most likely one, of targets that are one softmax
    status: Tensor  # int32 [batch, steps, 2], of the target's logits and of the draft's
    looked: Tensor  # float64 [batch, draft_len, parts], the drafts' logits
    state: Tensor  # float32 [batch, steps, parts, numbers]


class Slices:
    """The rows of a chain that is not filtered. tokens: the drafts, int64, as the shard counts them."""

    def __init__(self, shard: Shard, target: Target, draft: Draft, tokens: Tensor) -> None:
        if target.allowed is not None:
            target = target._replace(allowed=shifted_mask(shard, target.allowed))
        self.start, self.draft_len, self.logits = shard.start, tokens.shape[1], target.member_logits
        self.tokens, self.options = tokens.contiguous(), local.operator_options(target, draft)
        self.numbers = Numbers(*self._call("chain_of_shard"))

    def _call(self, name: str, *given: Tensor) -> Any:
        operator = local.operator_for(name, self.tokens)
        assert operator is not None
        return operator(self.logits, self.tokens, *given, **self.options)

    @property
    def unknown(self) -> Tensor:
        """Scores [batch, steps, 1] in the place of those that nobody writes down."""
        return self.numbers.largest.new_full((*self.numbers.tokens.shape, 1), -math.inf)

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
            values[..., :-1].transpose(1, 2).flatten(1)
            for values in (self.numbers.largest, self.numbers.sums, self.numbers.looked)
        )
        return Here(largest, self.numbers.tokens.repeat(1, parts), sums, looked)

    def of_drafts(self) -> Here:
        """[batch, drafts] of each."""
        found, n = self.numbers, self.draft_len
        return Here(found.largest[:, :n, -1], found.tokens[:, :n], found.sums[:, :n, -1], found.looked[..., -1])


class Places(NamedTuple):
    """A row of each of n places of a request."""

    rows: Tensor  # int64 [batch, n]
    shares: Tensor  # float64 [batch, n], the target's part in what is left
    masses: Tensor  # float64 [batch, steps, parts], the slice's part of each row's mass; negative: no token, a one-hot


def masses_of(target: Tensor, draft: Tensor) -> Tensor:
    """The masses of `Places`, of the target's parts [batch, steps, n] and of the drafts [batch, draft_len]."""
    missing = target.shape[1] - draft.shape[1]
    own = torch.nn.functional.pad(draft, (0, missing), value=-1.0)
    return torch.cat([target, own[..., None]], -1).contiguous()


def residuals(slices: Slices, places: Places) -> Tensor:
    """The masses of max(share * target - draft, 0) in blocks of this rank's tokens, float64 [batch, n, blocks]."""
    return slices._call("residual_of_shard", *places, slices.numbers.state)


class SlicedChoice(NamedTuple):
    """A row of each request to draw a token from, as `draw.Choice` has it of rows that are written down."""

    slices: Slices
    places: Places  # one of each request
    blocks: Tensor  # float64 [batch, blocks], the residual's masses
    target: Tensor  # float64 [batch], the target's mass here
    subtracts: Tensor
    uniform: Tensor
    logprobs: None = None

    def masses(self) -> tuple[Tensor, Tensor]:
        return self.blocks.sum(-1), self.target

    def reached(self, from_residual: Tensor, goal: Tensor) -> Tensor:
        own_mass = torch.where(from_residual, self.blocks.sum(-1), self.target)
        given = (*self.places, self.slices.numbers.state, self.blocks, from_residual, goal)
        tokens = self.slices._call("draw_of_shard", *given)
        last = torch.where(tokens >= 0, tokens + self.slices.start, -1).double()
        return torch.stack([torch.where((tokens >= 0) & (own_mass > goal), last, NO_ID), last], 1)
