"""Members that read prompts of their own with one set of weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specens.decoding.statistics import Statistics
from specens.engines.reading import Reading
from specens.engines.transformers.causal_lm import CausalLM
from specens.engines.transformers.member import Member


class Separate:
    """One member for each place: where the model cannot read prompts of different lengths as one batch."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = members

    @property
    def hidden(self) -> Tensor | None:
        """As of each member."""
        states = [member.hidden for member in self.members if member.hidden is not None]
        return torch.cat(states) if states else None

    def score(self, sequence: list[int], rows: int, parents: Sequence[int] = ()) -> Tensor:
        """Logits [places, rows, vocab]."""
        return torch.cat([member.score(sequence, rows, parents) for member in self.members])

    def roll_back(self, length: int) -> None:
        """As each member."""
        for member in self.members:
            member.roll_back(length)

    def keep(self, first: int, nodes: Sequence[int]) -> None:
        """As each member."""
        for member in self.members:
            member.keep(first, nodes)

    def settle(self, length: int) -> None:
        """As each member."""
        for member in self.members:
            member.settle(length)


def make_member(
    model: CausalLM,
    prompts: Sequence[list[int]],
    places: Sequence[int],
    statistics: Statistics,
    can_roll_back: bool,
    reading: Reading,
) -> Member | Separate:
    """What reads one text behind the prompts of some places: as one batch where the model can."""
    if reading.pads or len({len(prompt) for prompt in prompts}) == 1:
        return Member(model, prompts, places, statistics, can_roll_back, reading)
    alone = [
        Member(model, [prompt], [place], statistics, can_roll_back, reading)
        for prompt, place in zip(prompts, places, strict=True)
    ]
    return Separate(alone)
