"""The key that a share of a row needs is found in two collectives, whatever the scores and however they are cut."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from cases import many
from shards import bounds_of, in_lockstep
from torch import Tensor

from specens_kernels.distributed.search import Search, find_key
from specens_kernels.parts.written_tokens import Keys, WrittenTokens

WIDTH = 4000
KINDS = ("spread", "close together", "few values", "all alike", "far apart", "long runs", "in order", "a flat tail")
NEAR = 1e-9  # sums may round to either side


def scores_of(kind: str, numbers: torch.Generator) -> Tensor:
    """Scores [2, 3, WIDTH]; one row has tokens that are not there, one has none."""
    scores = torch.randn(2, 3, WIDTH, generator=numbers)
    shapes = {
        "spread": scores * 3,
        "close together": scores * 1e-6 + 5,
        "few values": (scores * 2).round(),
        "all alike": torch.full_like(scores, -2.5),
        "far apart": scores * 200,
        "long runs": (scores.exp() * 3).round() / 3,
        "in order": (scores * 2).sort(dim=-1, descending=True).values,  # so that one rank has all that matters
        "a flat tail": torch.where(scores > 3, scores + 9, scores * 1e-3),
    }
    own = shapes[kind]
    own[1, 1] = torch.where(torch.rand(WIDTH, generator=numbers) < 0.7, -torch.inf, own[1, 1])
    own[0, 2] = -torch.inf
    return own


def on_ranks(order: Keys, whole: WrittenTokens, needed: Tensor, bounds: list[int]) -> Search:
    """What all ranks find."""
    ranks = []
    for begin, end in itertools.pairwise(bounds):
        keys, weights = whole.keys[..., begin:end], whole.weights[..., begin:end]
        if begin == end:
            keys, weights = order.of(weights.new_full((2, 3, 1), -torch.inf)), weights.new_zeros(2, 3, 1)
        ranks.append(find_key(order, whole._replace(keys=keys, weights=weights), needed, [], weights[..., 0]))
    found, told = in_lockstep(ranks, range(len(ranks)))
    assert told.collectives == 2
    assert all(torch.equal(own, first) for other in found for own, first in zip(other, found[0]))
    return found[0]


def assert_reaches(whole: WrittenTokens, needed: Tensor, found: Search) -> None:
    """The key is the largest whose tokens, with all above, have the needed weight."""
    alive = (whole.weights > 0).any(-1)
    total = whole.weights.sum(-1)
    goal = (needed if needed.dim() == 2 else needed[:, None] * total).minimum(total)
    keys = whole.keys
    own = torch.where(keys >= found.key[..., None], whole.weights, 0.0).sum(-1)
    above = torch.where(keys > found.key[..., None], whole.weights, 0.0).sum(-1)
    assert ((keys == found.key[..., None]) & (whole.weights > 0)).any(-1)[alive].all()
    assert ((own >= goal * (1 - NEAR)) & (above < goal * (1 + NEAR)))[alive].all()
    torch.testing.assert_close(found.weight[alive], own[alive], rtol=NEAR, atol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weighs", ["masses", "counts"])
def test_the_key_is_that_of_the_whole_row(kind, weighs, monkeypatch):
    entries = WrittenTokens.entries

    def that_fit(*given: Any) -> Any:
        told = entries(*given)
        assert (told[1][..., -1] < 0).all(), "a rank has more keys to tell than it may"
        return told

    monkeypatch.setattr(WrittenTokens, "entries", that_fit)
    for seed in range(many(6)):
        numbers, choice = torch.Generator().manual_seed(seed), random.Random(seed)
        dtype = choice.choice([torch.float32, torch.float32, torch.bfloat16, torch.float16])
        tiny = 1e-30 if dtype == torch.float32 else 1.0
        scores = (scores_of(kind, numbers) * choice.choice([1.0, 1.0, tiny])).to(dtype).double()
        order = Keys(dtype, choice.random() < 0.5, WIDTH)
        if weighs == "counts":
            whole = WrittenTokens(order.of(scores), (scores > -torch.inf).double(), None, None)
            needed = torch.tensor([[7.0, 1500.0, 1.0], [2.0**40, 900.0, 3999.0]], dtype=torch.float64)
        else:
            temperature = torch.tensor([1.0, choice.choice([0.02, 0.7, 40.0])], dtype=torch.float64)
            largest = scores.amax(-1)
            masses = ((scores - largest[..., None]) / temperature[:, None, None]).exp().nan_to_num(nan=0.0)
            whole = WrittenTokens(order.of(scores), masses, temperature, largest)
            needed = torch.tensor([0.3, choice.choice([0.9, 1 - 2.0**-20, 1e-9])], dtype=torch.float64)
        bounds = bounds_of(WIDTH, choice.choice([1, 2, 4, 7]), choice)
        assert_reaches(whole, needed, on_ranks(order, whole, needed, bounds))
