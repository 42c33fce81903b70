"""A trace as it is read back, and what its rounds add up to."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from specens.decoding.trace import PHASES, Round
from specens.files.json_lines import name_of, parse_lines, read_bytes
from specens.files.trace_file import FORMAT

RUN_FIELDS = frozenset({"models", "schedule", "draft_lens", "ensemble"})
ROUND_FIELDS = frozenset(each.name for each in fields(Round)) | {"num_accepted"}
TEXT_FIELDS = frozenset({"line", "index", "sample"})


@dataclass
class TracedText:
    """The rounds of one text, as `Round.to_dict` gives them; end: its last line, None where the run ended before."""

    index: int
    sample: int
    rounds: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] | None = None


@dataclass
class Trace:
    """All that a file says. run: about models and schedule. torn: whether its last line was cut off."""

    run: dict[str, Any]
    texts: list[TracedText]
    torn: bool

    @property
    def rounds(self) -> list[dict[str, Any]]:
        """The rounds of all texts."""
        return [one for text in self.texts for one in text.rounds]


@dataclass
class Totals:
    """Sums over rounds; lists have one entry a member, of drafts one more for drafters that are no member.

    by_position: of each place in a chain, or level of a tree, how often the test came to it and how often it accepted.
    """

    num_rounds: int
    num_tokens: int
    kinds: Counter[str]
    forwards: list[int]
    forward_seconds: list[float]
    phases: dict[str, float]
    tested: list[int]
    accepted: list[int]
    by_position: list[tuple[int, int]]


def read_trace(path: Path) -> Trace:
    """Read a file that `specens generate --trace` wrote; raises ValueError where it is something else.

    Of a text that was begun twice, since its run was ended, the last beginning counts.
    """
    data = read_bytes(path)
    whole = data[: data.rfind(b"\n") + 1]
    run, *lines = parse_lines(path, whole) or [{}]
    if run.get("format") != FORMAT:
        raise ValueError(
            f"{name_of(path)}: expected a file of `specens generate --trace`, got a first line without {FORMAT!r}"
        )
    texts: dict[tuple[int, int], TracedText] = {}
    _check_fields(path, RUN_FIELDS, run)
    for line in lines:
        _check_fields(path, ROUND_FIELDS if line.get("line") == "round" else TEXT_FIELDS, line)
        index = (line["index"], line["sample"])
        if index not in texts or line.get("number") == 0:
            texts[index] = TracedText(*index)
        if line["line"] == "round":
            texts[index].rounds.append(line)
        else:
            texts[index].end = line
    return Trace(run, [texts[index] for index in sorted(texts)], len(whole) < len(data))


def _check_fields(path: Path, names: frozenset[str], line: dict[str, Any]) -> None:
    missing = sorted(names - line.keys())
    if missing:
        raise ValueError(f"{name_of(path)}: expected lines of a trace, got one without {', '.join(missing)}")


def add_up(rounds: list[dict[str, Any]], num_members: int) -> Totals:
    """The sums over some rounds."""
    events = [event for one in rounds for event in one["events"]]
    tested, accepted = ([0] * (num_members + 1) for _ in range(2))
    for one in rounds:
        for event in one["events"][: one["num_accepted"]]:
            for counts in (tested, accepted):
                counts[_index(event["proposer"])] += 1
        if was_rejected(one):
            tested[_index(_first_rejected(one)["proposer"])] += 1
    return Totals(
        num_rounds=len(rounds),
        num_tokens=len(events),
        kinds=Counter(event["kind"] for event in events),
        forwards=[sum(one["forwards"][member] for one in rounds) for member in range(num_members)],
        forward_seconds=[sum(one["forward_seconds"][member] for one in rounds) for member in range(num_members)],
        phases={phase: sum(one["seconds"][phase] for one in rounds) for phase in PHASES},
        tested=tested,
        accepted=accepted,
        by_position=_by_position(rounds),
    )


def was_rejected(one: dict[str, Any]) -> bool:
    """Whether the test of a round ended with a rejection, and not after its last draft or at the end of the text."""
    return bool(one["events"]) and one["events"][-1]["kind"] == "recovered"


def _first_rejected(one: dict[str, Any]) -> dict[str, Any]:
    """The first draft that was tested after the accepted ones."""
    if not one["tree"]:
        return one["drafts"][one["num_accepted"]]
    last = max((number for number, draft in enumerate(one["drafts"]) if draft["accepted"]), default=-1)
    return next(draft for draft in one["drafts"] if draft["parent"] == last)


def _index(proposer: int | None) -> int:
    return -1 if proposer is None else proposer


def _by_position(rounds: list[dict[str, Any]]) -> list[tuple[int, int]]:
    depths = [(one["num_accepted"] + was_rejected(one), one["num_accepted"]) for one in rounds]
    deepest = max((tested for tested, _ in depths), default=0)
    return [
        (sum(tested > index for tested, _ in depths), sum(accepted > index for _, accepted in depths))
        for index in range(deepest)
    ]
