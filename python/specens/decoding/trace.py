"""What happened in each round of a generation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from specens.decoding.detokenizer import text_of
from specens.decoding.request import Draft, Event, Request

PHASES = ("propose", "score", "verify")


@dataclass(frozen=True)
class Round:
    """A round that settled tokens of a text, and what the text has cost since the last one.

    index, sample: of the text, as in a Generation. number: of the round, from 0. position: of its first token.
    drafts: the tokens that were tested, with their texts; of a tree all its nodes. events: what was settled: accepted
        drafts, and perhaps the next token. tree: whether the drafts are one.
    forwards, forward_seconds: of each member. seconds: by phase, each with the forwards in it.
    """

    index: int
    sample: int
    number: int
    position: int
    drafts: list[dict[str, Any]]
    events: list[Event]
    tree: bool
    forwards: list[int]
    forward_seconds: list[float]
    seconds: dict[str, float]

    @property
    def num_accepted(self) -> int:
        """How many drafts became tokens of the text."""
        return sum(event.kind == "draft accepted" for event in self.events)

    def to_dict(self) -> dict:
        """Everything as plain values for JSON."""
        return {"line": "round", "num_accepted": self.num_accepted} | asdict(self)


@dataclass
class _Totals:
    """What a text has cost so far."""

    number: int
    forwards: list[int] = field(default_factory=list)
    forward_seconds: list[float] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


class Tracer:
    """Makes a Round of what changed in a request since the last one. tokenizer: for the drafts' texts, or None."""

    def __init__(self, on_round: Callable[[Round], None], tokenizer: Any | None) -> None:
        self._on_round = on_round
        self._tokenizer = tokenizer
        self._before: dict[tuple[int, int], _Totals] = {}

    def note(self, request: Request, events: Sequence[Event]) -> None:
        """Report the round that gave a request these events."""
        text = (request.task.index, request.task.sample)
        statistics = request.statistics
        before = self._before.pop(text, None) or _Totals(-1)
        now = _Totals(
            before.number + 1,
            list(statistics.forwards),
            list(statistics.forward_seconds),
            {phase: getattr(statistics, f"{phase}_seconds") for phase in PHASES},
        )
        if not request.finished:
            self._before[text] = now
        drafts, is_tree = request.take_tested()
        self._on_round(
            Round(
                *text,
                number=now.number,
                position=request.num_settled - len(events),
                drafts=[self._describe(draft) for draft in drafts],
                events=list(events),
                tree=is_tree,
                forwards=_difference(now.forwards, before.forwards),
                forward_seconds=_difference(now.forward_seconds, before.forward_seconds),
                seconds={phase: value - before.seconds.get(phase, 0.0) for phase, value in now.seconds.items()},
            )
        )

    def _describe(self, draft: Draft) -> dict[str, Any]:
        if self._tokenizer is None or draft.token < 0:
            return asdict(draft) | {"text": ""}
        return asdict(draft) | {"text": text_of(self._tokenizer, [draft.token])}


def _difference(now: list, before: list) -> list:
    return [value - (before[index] if before else 0) for index, value in enumerate(now)]
