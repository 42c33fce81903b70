"""The largest key whose tokens, with all above, have a weight, where a row lies on several ranks: two collectives.

Keys are the bits of scores, in their order. Those of 16 bits are found by two digits: the weights of 256 buckets each.
For float32 that would take four, so ranks tell samples of what they have, and then all that lies between two of them.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from specens_kernels.distributed.steps import Steps
from specens_kernels.parts.written_tokens import BESIDE_KEY, BUCKETS, DIGIT, Bracket, Keys, octaves_of
from specens_kernels.sampling import LARGEST_TOP_P


class Tokens(Protocol):
    """This rank's tokens of rows, and their weights."""

    @property
    def temperature(self) -> Tensor | None: ...  # float64 [batch], of weights that are masses; None: they are counts
    @property
    def largest(self) -> Tensor | None: ...  # float64 [batch, rows], the score that has the mass 1

    def histogram(self, prefix: Tensor, shift: int) -> Tensor:
        """The weights [batch, rows, BUCKETS] of each value of a digit, of keys that begin with prefix [batch, rows]."""

    def total(self) -> Tensor:
        """Of all of them, float64 [batch, rows]."""

    def samples(self, num: int, count: int) -> list[Tensor]:
        """The weights of octaves from the highest one here on, float64 [batch, rows, num]; that one, with keys.

        These, float64 [batch, rows, 1 + count], are one of so many in descending order, each with the share that it
        and those above have of their octave.
        """

    def entries(self, found: Bracket, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The weight above a bracket [batch, rows, 1]; its keys, how often each comes, and weights, [.., count] each.

        A key is -1 where there is none.
        """


class Search(NamedTuple):
    key: Tensor  # int64 [batch, rows], the largest such that those not below it have the needed weight
    weight: Tensor  # float64 [batch, rows], that they have
    total: Tensor  # float64 [batch, rows], of all keys


def first_of_search(order: Keys, own: Tokens, like: Tensor) -> list[Tensor]:
    """What a rank tells first, each float64 [batch, rows, numbers]: weights, and what does not hang on their scale.

    like: any tensor [batch, rows].
    """
    if order.bits == 32:
        return own.samples(num_octaves(own, order.vocab), num_samples(order, own))
    return [own.histogram(torch.zeros_like(like, dtype=torch.int64), DIGIT)]


def find_key(order: Keys, own: Tokens, needed: Tensor, told: list[Tensor], like: Tensor) -> Steps[Search]:
    """Find a key by sums of weights: two collectives, or one where ranks have told `first_of_search`.

    needed: [batch, rows], or [batch], the share of the whole. told: each [ranks, batch, rows, numbers].
    """
    if not told:
        first = first_of_search(order, own, like)
        heard = yield torch.cat([part.flatten(1) for part in first], 1)
        parts = heard.split([part[0].numel() for part in first], 2)
        told = [part.view(len(heard), *like.shape) for part, like in zip(parts, first)]
    if order.bits == 32:
        return (yield from by_samples(order, own, needed, told))
    return (yield from by_digits(own, needed, told[0]))


def goal_of(needed: Tensor, total: Tensor) -> Tensor:
    return needed if needed.dim() == 2 else needed[:, None] * total


def first_reached(weights: Tensor, goal: Tensor) -> tuple[Tensor, Tensor]:
    """Where a sum of weights [batch, rows, n] reaches the goal, [batch, rows, 1], and the sum before that.

    The last one with weight where rounding reaches none.
    """
    sums = weights.cumsum(-1)
    reached = sums >= goal[..., None]
    last = torch.where(weights > 0, torch.arange(weights.shape[-1], device=weights.device), 0).amax(-1)
    index = torch.where(reached.any(-1), reached.int().argmax(-1), last)[..., None]
    return index, torch.nn.functional.pad(sums, (1, 0)).gather(-1, index)[..., 0]


def by_digits(own: Tokens, needed: Tensor, told: Tensor) -> Steps[Search]:
    """`find_key` of 16 bits."""
    falling = told.sum(0).flip(-1)
    total = falling.sum(-1)
    goal = goal_of(needed, total)
    index, above = first_reached(falling, goal)
    high = BUCKETS - 1 - index[..., 0]
    second = own.histogram(high, 0)
    heard = yield second.flatten(1)
    falling = heard.view(len(heard), *second.shape).sum(0).flip(-1)
    index, before = first_reached(falling, goal - above)
    weight = above + before + falling.gather(-1, index)[..., 0]
    return Search(high * BUCKETS + BUCKETS - 1 - index[..., 0], weight, total)


def are_packed(order: Keys, own: Tokens) -> bool:
    """Whether a key and how often it comes say all, and are one number."""
    return (order.exact or own.temperature is None) and order.vocab < BESIDE_KEY


def num_samples(order: Keys, own: Tokens) -> int:
    """Such that these, and `num_entries`, are the fewest numbers together."""
    return math.ceil(math.sqrt(3 * order.vocab * (1 if are_packed(order, own) else 2)))


def num_entries(order: Keys, own: Tokens, ranks: int) -> int:
    """The most keys that a rank has between the bounds of `bracket`.

    At another rank's sample the weight of a rank is known but for its tokens between two samples, in an octave the
    weight of at most twice as many of the other's, and the bracket is as wide as that of all ranks. It reaches to the
    next samples of any rank at both ends, and a key that comes often may hide as many tokens as lie between two. How
    shares are rounded is worth a token of 2**18.
    """
    return 3 * (-(-order.vocab // num_samples(order, own)) + ranks) + order.vocab // 2**18 + 4


def num_octaves(own: Tokens, vocab: int) -> int:
    """Of tokens below them top-p keeps none, as all together have less than the least that it leaves out."""
    return 1 if own.temperature is None else math.ceil(math.log2(vocab / (1 - LARGEST_TOP_P))) + 2


def bracket(own: Tokens, needed: Tensor, told: list[Tensor]) -> Bracket:
    """The samples of all ranks that surely have the weight, or have not."""
    of_octaves, (tops, codes) = told[0], (told[1][..., :1], told[1][..., 1:].long())
    num, top = of_octaves.shape[-1], tops.amax(0)
    place = torch.arange(num, device=top.device) + (top - tops).clamp(max=num).long()
    aligned = torch.zeros_like(of_octaves).scatter_add(-1, place.clamp(max=num - 1), of_octaves)
    falling = aligned.sum(0)
    total = falling.sum(-1)
    goal = goal_of(needed, total)
    index, above = first_reached(falling, goal)
    rest, octave = (goal - above)[..., None], top - index
    whole = aligned.gather(-1, index.expand(len(aligned), *index.shape))  # of each rank, [ranks, batch, rows, 1]

    keys, share = codes // BESIDE_KEY, codes % BESIDE_KEY
    inside = (keys > 0) & (octaves_of(keys, own.temperature) == octave)  # 0: no sample
    least = torch.where(inside, whole * (share - 1).clamp(min=0) / (BESIDE_KEY - 1), 0.0)  # a share is rounded down
    most = torch.where(inside, whole * ((share + 2) / (BESIDE_KEY - 1)).clamp(max=1), whole)
    # Below a sample's key a rank has at least what is at the sample, and at most what is at the next one.
    rises = torch.where(inside, least.diff(dim=-1, prepend=torch.zeros_like(whole)), 0.0)
    rises_most = torch.where(inside, torch.cat([most[..., 1:], whole], -1) - most, 0.0)
    begin = most.amin(-1).sum(0)[..., None]
    keys, rises, rises_most = (
        part.movedim(0, 2).flatten(2) for part in (torch.where(inside, keys, -1), rises, rises_most)
    )
    keys, order = keys.sort(dim=-1, descending=True, stable=True)
    surely = (rises.gather(-1, order).cumsum(-1) >= rest) & (keys >= 0)
    low = torch.where(surely, keys, -1).amax(-1)
    is_last = keys != torch.nn.functional.pad(keys[..., 1:], (0, 1), value=-1)
    never = (begin + rises_most.gather(-1, order).cumsum(-1) < rest) & is_last
    high = torch.where(never, keys, 2**32).amin(-1)
    return Bracket(octave[..., 0], low, high, goal, total)


def by_samples(order: Keys, own: Tokens, needed: Tensor, told: list[Tensor]) -> Steps[Search]:
    """`find_key` of float32."""
    found, count = bracket(own, needed, told), num_entries(order, own, len(told[0]))
    over, keys, repeats, weights = own.entries(found, count)
    packed = are_packed(order, own)
    numbers = [keys.double() * BESIDE_KEY + repeats] if packed else [keys.double(), weights]
    heard = yield torch.cat([over, *numbers], -1).flatten(1)
    heard = heard.view(len(heard), *over.shape[:2], 1 + len(numbers) * count)
    above, numbers = heard[..., 0].sum(0), list(heard[..., 1:].movedim(0, 2).split(count, -1))
    keys = numbers[0].flatten(2).long()
    if packed:
        keys, repeats = keys.div(BESIDE_KEY, rounding_mode="floor"), (keys % BESIDE_KEY).double()
        weights = repeats
        if own.temperature is not None and own.largest is not None:
            scaled = (order.scores(keys) - own.largest[..., None]) / own.temperature[:, None, None]
            weights = torch.where(keys >= 0, repeats * scaled.exp(), 0.0)
    else:
        weights = numbers[1].flatten(2)
    keys, by_key = keys.sort(dim=-1, descending=True, stable=True)
    weights = weights.gather(-1, by_key)
    index, _ = first_reached(weights, found.goal - above)
    key = keys.gather(-1, index)
    weight = above + torch.where(keys >= key, weights, 0.0).sum(-1)
    key = torch.where(key[..., 0] >= 0, key[..., 0], found.high)
    return Search(key, torch.where(keys[..., 0] >= 0, weight, above), found.total)
