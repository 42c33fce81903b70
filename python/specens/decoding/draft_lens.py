"""How many tokens are drafted in a row: a number, or one that adapts to each request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specens.decoding.ideal import fixed_speedup, outside_speedup
from specens.decoding.request import OUTSIDE, Request

PRIOR_TESTS = 2.0  # the weight of `expected` among measured drafts


@dataclass(frozen=True)
class ByConfidence:
    """Drafts until the drafter was not sure: nothing is drafted after a token of a probability below `threshold`.

    That token itself is tested as any other, so the text keeps its law. The probability is the one with which the token
    was drawn, after temperature and filters; at temperature 0 that at temperature 1.

    threshold: in (0, 1). most: drafts in a row at most. hands_over: a token of which the drafter is not sure is not
        drafted either, but written by the target. The probability is then that of its most likely token: were a draft
        taken back for what it is, the text would have another law.
    Sources: Liu et al., Kangaroo, NeurIPS 2024; `assistant_confidence_threshold` of transformers; hands_over is the
    fallback policy of Kim et al., BiLD, NeurIPS 2023, whose rollback policy is the rule Threshold.
    Raises ValueError where one is out of range.
    """

    threshold: float
    most: int = 16
    hands_over: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.threshold < 1:
            raise ValueError(f"draft_lens: expected a threshold in (0, 1), got {self.threshold!r}")
        _check_most(self.most)
        if not isinstance(self.hands_over, bool):
            raise ValueError(f"draft_lens: expected hands_over to be True or False, got {self.hands_over!r}")

    def __str__(self) -> str:
        return f"{'fallback' if self.hands_over else 'confidence'}>={self.threshold:g}"


@dataclass(frozen=True)
class ByAcceptance:
    """Drafts as many tokens as give the most tokens a second at the acceptance that a request's drafts have had so far.

    The acceptance is that of the request alone, older rounds counting less, and cost is given: were either measured
    on the clock or over the batch, a seed would give other texts in other company.

    most: drafts in a row at most. cost: of one more draft, by that of the other members' forwards of one token
        together: the drafter's forward, and what reading one more token adds to theirs. Where it has a weight in the
        ensemble, the drafter's forward alone. `specens compare` shows what forwards cost.
    expected: the acceptance assumed at first, to which the measured one returns while nothing is tested, so that a
        request that drafts nothing tries again. decay: what a round counts, by the one after it.
    Sources: the rate of tokens is that of `specens.decoding.ideal`; Leviathan et al., ICML 2023, section 3.5.
    Raises ValueError where one is out of range.
    """

    most: int
    cost: float
    expected: float = 0.8
    decay: float = 0.95

    def __post_init__(self) -> None:
        _check_most(self.most)
        if self.cost < 0:
            raise ValueError(f"draft_lens: expected a cost >= 0, got {self.cost!r}")
        for name in ("expected", "decay"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"draft_lens: expected {name} in (0, 1), got {getattr(self, name)!r}")

    def choose(self, request: Request, proposer: int) -> int:
        """The length of the next chain of a request; called once a round."""
        acceptance = self.acceptance(request, proposer)
        speedup = fixed_speedup if proposer != OUTSIDE and proposer in request.counted else outside_speedup
        return max(range(self.most + 1), key=lambda length: speedup(length, acceptance, self.cost))

    def acceptance(self, request: Request, proposer: int) -> float:
        """The estimate after what was tested since the last call, which counts as one round."""
        seen: Seen = request.measured.setdefault(proposer, Seen())
        seen.add(request.statistics.tested[proposer], request.statistics.accepted[proposer], self.decay)
        return (seen.recent_accepted + PRIOR_TESTS * self.expected) / (seen.recent_tested + PRIOR_TESTS)

    def __str__(self) -> str:
        return f"acceptance<={self.most}"


@dataclass
class Seen:
    """What became of a request's drafts: counts so far, and sums in which each round counts less than the next."""

    tested: int = 0
    accepted: int = 0
    recent_tested: float = 0.0
    recent_accepted: float = 0.0

    def add(self, tested: int, accepted: int, decay: float) -> None:
        """Book the counts so far, of which those that are new belong to one round."""
        self.recent_tested = decay * self.recent_tested + tested - self.tested
        self.recent_accepted = decay * self.recent_accepted + accepted - self.accepted
        self.tested, self.accepted = tested, accepted


DraftLen = int | ByConfidence | ByAcceptance


def most_drafts(length: DraftLen) -> int:
    """The longest chain."""
    return length if isinstance(length, int) else length.most


def chain_lens(length: DraftLen, requests: Sequence[Request], proposer: int) -> list[int]:
    """The longest chain of each request in this round."""
    if isinstance(length, ByAcceptance):
        return [length.choose(request, proposer) for request in requests]
    return [most_drafts(length)] * len(requests)


def confidence(length: DraftLen) -> dict[str, Any]:
    """What `Drafter.propose` is told of it."""
    if not isinstance(length, ByConfidence):
        return {}
    return {"min_probability": length.threshold} | ({"hands_over": True} if length.hands_over else {})


def _check_most(most: object) -> None:
    if not isinstance(most, int) or isinstance(most, bool) or most < 1:
        raise ValueError(f"draft_lens: expected most to be an integer >= 1, got {most!r}")
