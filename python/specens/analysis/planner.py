"""Which schedule pays: tokens a second of each, predicted from what forwards cost and how often drafts are accepted.

A text's acceptance is known at each of its positions for each member as a drafter: the chance that its draft is taken
there, sum(min(member, target)) over the vocabulary. Along these positions the rules of a schedule are followed step by
step, with as many members as there are and every draft length, and each forward costs what one of so many tokens costs.
At one acceptance and one cost everywhere the results are those of `specens.decoding.ideal`.

Members may have devices or machines of their own. What a schedule does at one time then takes as long as the busiest
device, on which forwards go one after the other. A read by a member elsewhere than on device 0, where texts are
verified, also takes its link's latency, there and back, and the time of its rows of logits at the link's bandwidth: as
many rows as new tokens, and one of a prompt. What passes outside forwards is in the way of all of them.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from specens.analysis.simulation import Simulation
from specens.settings.arguments import indices_read_together

REPEATS = 16
UNMEASURED_TEXTS = 4
MOST_COMBINATIONS = 100
WORTHWHILE = 1.02  # a speed-up that is less than this is none


@dataclass(frozen=True)
class GroupCost:
    """Seconds of a forward of the members at some indices, who share weights; of one member in most cases.

    seconds: by the number of tokens; between the numbers measured, and beyond them, it is taken to grow evenly.
    prompt: of the forward that reads the prompt.
    """

    seconds: dict[int, float]
    prompt: float

    def of(self, num_tokens: int) -> float:
        """Seconds of a forward of so many tokens."""
        counts = sorted(self.seconds)
        if num_tokens in self.seconds or len(counts) == 1:
            return self.seconds.get(num_tokens, self.seconds[counts[0]])
        above = next((index for index, count in enumerate(counts) if count > num_tokens), len(counts) - 1)
        low, high = counts[max(above, 1) - 1], counts[max(above, 1)]
        share = (num_tokens - low) / (high - low)
        return self.seconds[low] + share * (self.seconds[high] - self.seconds[low])


@dataclass(frozen=True)
class Link:
    """What rows of logits pass. seconds: of a read there and back, without its rows."""

    seconds: float = 0.0
    bytes_per_second: float = math.inf

    def of(self, num_bytes: float) -> float:
        """Seconds of a read whose rows are so many bytes."""
        return self.seconds + num_bytes / self.bytes_per_second


@dataclass(frozen=True)
class Measured:
    """What predictions are made from.

    costs: by the indices that are read together. outside: seconds outside forwards for each forward.
    acceptance: of each text, and each member as the drafter, the chance of acceptance at every position.
    counted: the indices with a weight. weights: of the indices; of members that share weights the heaviest drafts.
    groups: the indices of members that share weights. least: of each member as the drafter, the acceptance that theorem
    3.2 of Fu et al. promises for any text, or None where it does not hold. looked_up: of each text, at every position,
    how many tokens a lookup drafts there, and how many of them are those that follow; empty where none was asked for.
    devices: of the indices, on which device or machine each is; all on device 0 where none is named. link: from there
    to each other one, row_bytes: of a row of logits on it; where costs were measured through it, they say it already.
    """

    costs: dict[tuple[int, ...], GroupCost]
    outside: float
    acceptance: list[list[list[float]]]
    counted: tuple[int, ...]
    weights: tuple[float, ...]
    groups: list[list[int]]
    least: tuple[float, ...] | None = None
    looked_up: list[list[tuple[int, int]]] = field(default_factory=list)
    devices: tuple[int, ...] = ()
    link: Link = Link()
    row_bytes: float = 0.0

    @property
    def apart(self) -> bool:
        """Whether members are on several devices, so that forwards may go on at the same time."""
        return len(set(self.devices)) > 1

    @property
    def num_members(self) -> int:
        """How many members there are."""
        return len(self.weights)

    def mean_acceptance(self) -> list[float]:
        """Of each member as the drafter."""
        joined = [list(itertools.chain(*texts)) for texts in zip(*self.acceptance, strict=True)]
        return [sum(chances) / len(chances) for chances in joined]

    def to_dict(self) -> dict:
        """Plain values for JSON, with the indices that are read together as text: "0", "0,1"."""
        costs = {",".join(map(str, indices)): asdict(cost) for indices, cost in self.costs.items()}
        means = self.mean_acceptance()
        rest = {"outside": self.outside, "acceptance": means, "groups": self.groups, "devices": list(self.devices)}
        bandwidth = None if math.isinf(self.link.bytes_per_second) else self.link.bytes_per_second
        link = {"seconds": self.link.seconds, "bytes_per_second": bandwidth}
        return {"costs": costs} | rest | {"link": link, "row_bytes": self.row_bytes}


def unmeasured(weights: Sequence[float], num_tokens: int) -> Measured:
    """Of members that are not here, for `Given` to complete: texts of so many tokens, and no time outside forwards."""
    return Measured(
        costs={},
        outside=0.0,
        acceptance=[[[0.0] * num_tokens for _ in weights]] * UNMEASURED_TEXTS,
        counted=tuple(index for index, weight in enumerate(weights) if weight),
        weights=tuple(weights),
        groups=[[index] for index in range(len(weights))],
    )


@dataclass(frozen=True)
class Given:
    """What is planned for in place of what is measured here; None leaves that. The fields are those of `Measured`.

    costs: of each member. acceptance: of each member as the drafter, at any position.
    """

    costs: Sequence[GroupCost] | None = None
    acceptance: Sequence[float] | None = None
    devices: tuple[int, ...] | None = None
    link: Link | None = None
    row_bytes: float | None = None

    def over(self, measured: Measured) -> Measured:
        """What was measured, but for what is given. Raises ValueError where members that share weights are told apart.

        These are read together, at costs of their own, and lie on one device.
        """
        shared = [group for group in measured.groups if len(group) > 1]
        if shared and self.costs is not None:
            raise ValueError(f"costs: expected none where members {shared[0]} share weights and are read together")
        if shared and self.devices and any(len({self.devices[index] for index in group}) > 1 for group in shared):
            raise ValueError(f"devices: expected one for members that share weights, {shared[0]}; got {self.devices}")
        found: dict[str, Any] = {
            name: value for name in ("devices", "link", "row_bytes") if (value := getattr(self, name)) is not None
        }
        if self.costs is not None:
            found["costs"] = {(index,): cost for index, cost in enumerate(self.costs)}
        if self.acceptance is not None:
            texts = [
                [[chance] * len(own) for chance, own in zip(self.acceptance, text)] for text in measured.acceptance
            ]
            found["acceptance"] = texts
        return replace(measured, **found)


@dataclass(frozen=True)
class Candidate:
    """A schedule with its settings, as `SpeculativeEnsemble` takes them.

    drafter: a member, or what the command line calls a lookup, for which the lengths are all the same.
    """

    schedule: str
    draft_lens: tuple[int, ...]
    drafter: int | str | None = None

    def __str__(self) -> str:
        if self.schedule == "standard":
            return self.schedule
        lens = ",".join(map(str, self.draft_lens if self.schedule == "alternate" else self.draft_lens[:1]))
        return f"{self.schedule} {lens}" + ("" if self.drafter is None else f", drafter {self.drafter}")

    @property
    def reads_alone(self) -> int | None:
        """The member that is fed before the others, or beside them, the drafter of `fixed` and `parallel`, or None."""
        drafts_alone = self.schedule in ("fixed", "parallel") and not isinstance(self.drafter, str)
        return int(self.drafter or 0) if drafts_alone else None

    def read_together(self, groups: list[list[int]]) -> list[list[int]]:
        """The indices that the same forwards score. groups: those of members that share weights."""
        return indices_read_together(self.schedule, groups, self.reads_alone)

    @property
    def options(self) -> str:
        """For the command line."""
        counted = self.draft_lens[:1] if isinstance(self.drafter, str) else self.draft_lens
        lens = "" if self.schedule == "standard" else f" --draft-lens {','.join(map(str, counted))}"
        return f"--schedule {self.schedule}{lens}" + ("" if self.drafter is None else f" --drafter {self.drafter}")


@dataclass(frozen=True)
class Prediction:
    """What a candidate is expected to reach.

    speedup: by the tokens a second of `standard`. forwards: of each member, for one token of the text, those that read
    prompts aside. acceptance: accepted among tested drafts; None for `standard`. least_speedup: what the weights alone
    promise, for any text, at these costs; None where they promise nothing.
    """

    candidate: Candidate
    tokens_per_second: float
    speedup: float
    forwards: list[float] = field(default_factory=list)
    acceptance: float | None = None
    least_speedup: float | None = None

    def to_dict(self) -> dict:
        """Everything as plain values for JSON."""
        return asdict(self) | {"options": self.candidate.options}


def candidates(
    num_members: int, longest: int, lookup: str | None = None, *, apart: bool = False
) -> Iterator[Candidate]:
    """Every schedule of chains with draft lengths up to `longest`; of many members' lengths only the small ones mix.

    lookup: what the command line calls a drafter that looks up, which then drafts too. apart: whether members have
    devices of their own, as `parallel` needs.
    """
    yield Candidate("standard", (1,) * num_members)
    members = range(num_members) if num_members > 1 else ()
    for drafter in [*members, *([] if lookup is None else [lookup])]:
        for draft_len in range(1, longest + 1):
            yield Candidate("fixed", (draft_len,) * num_members, drafter)
    for drafter in members if apart else ():
        for draft_len in range(1, longest + 1):
            yield Candidate("parallel", (draft_len,) * num_members, drafter)
    if num_members < 2:
        return
    mixed = max((top for top in range(1, longest + 1) if top**num_members <= MOST_COMBINATIONS), default=1)
    even = [(draft_len,) * num_members for draft_len in range(mixed + 1, longest + 1)]
    for lens in [*itertools.product(range(1, mixed + 1), repeat=num_members), *even]:
        yield Candidate("alternate", lens)
    for drafter in range(num_members):
        for draft_len in range(1, longest + 1):
            yield Candidate("alternate", (draft_len,) * num_members, drafter)


def predict_all(measured: Measured, chosen: Sequence[Candidate], *, seed: int = 0) -> list[Prediction]:
    """The predictions of some candidates, the fastest first; speed-ups are over `standard`, chosen or not."""
    baseline = predict(measured, Candidate("standard", (1,) * measured.num_members), seed=seed)
    found = [predict(measured, candidate, baseline.tokens_per_second, seed=seed) for candidate in chosen]
    return sorted(found, key=lambda prediction: -prediction.tokens_per_second)


def pick(predictions: Sequence[Prediction]) -> Prediction:
    """The fastest of some predictions, which stands first; `standard`, if it is among them, where that hardly pays."""
    plain = [one for one in predictions if one.candidate.schedule == "standard"]
    return plain[0] if plain and predictions[0].speedup < WORTHWHILE else predictions[0]


def predict(measured: Measured, candidate: Candidate, baseline: float | None = None, *, seed: int = 0) -> Prediction:
    """The prediction of one candidate, for texts as long as those measured. baseline: `standard`'s tokens a second."""
    indices = candidate.read_together(measured.groups)
    random_numbers = random.Random(seed)
    drafts_by_chance = candidate.schedule != "standard" and not isinstance(candidate.drafter, str)

    def run_all(texts: list[list[list[float]]]) -> tuple[list[Simulation], float]:
        lookups = measured.looked_up or [[]] * len(texts)
        by_chance = drafts_by_chance and any(0 < chance < 1 for text in texts for own in text for chance in own)
        pairs = [pair for pair in zip(texts, lookups, strict=False) for _ in range(REPEATS if by_chance else 1)]
        runs = [simulate(measured, candidate, indices, text, random_numbers, found) for text, found in pairs]
        seconds = sum(_seconds(run, indices, measured) for run in runs)
        return runs, sum(run.num_tokens for run in runs) / seconds

    runs, rate = run_all(measured.acceptance)
    num_tokens = sum(run.num_tokens for run in runs)
    tested = sum(run.num_tested for run in runs)
    later = [sum(len(run.reads[group]) for run in runs) for group in range(len(indices))]
    group_of = {index: number for number, group in enumerate(indices) for index in group}
    least = None
    if measured.least is not None and tested and not isinstance(candidate.drafter, str):
        least = run_all([[[chance] * runs[0].num_tokens for chance in measured.least]])[1] / (baseline or rate)
    return Prediction(
        candidate,
        rate,
        rate / (baseline or rate),
        [later[group_of[index]] / num_tokens for index in range(measured.num_members)],
        sum(run.num_accepted for run in runs) / tested if tested else None,
        least,
    )


def simulate(
    measured: Measured,
    candidate: Candidate,
    indices: list[list[int]],
    text: list[list[float]],
    random_numbers: random.Random,
    looked_up: Sequence[tuple[int, int]] = (),
) -> Simulation:
    """One text under a candidate. indices: that are read together; text: the acceptance of each member."""
    run = Simulation(indices, text, measured.counted, random_numbers)
    if candidate.schedule == "standard":
        run.standard()
    elif isinstance(candidate.drafter, str):
        run.looked_up(looked_up, candidate.draft_lens[0])
    elif candidate.schedule == "fixed":
        drafter = candidate.reads_alone or 0
        run.fixed(drafter, candidate.draft_lens[drafter])
    elif candidate.schedule == "parallel":
        drafter = candidate.reads_alone or 0
        run.parallel(drafter, candidate.draft_lens[drafter])
    elif candidate.schedule != "alternate":
        known = "standard, fixed, alternate or parallel"
        raise ValueError(f"schedule: expected {known} to predict, got {candidate.schedule!r}")
    else:
        proposers = [
            max(group, key=lambda index: (index == candidate.drafter, abs(measured.weights[index])))
            for group in indices
        ]
        run.alternate(proposers, candidate.draft_lens, candidate.drafter)
    return run


def _seconds(run: Simulation, indices: Sequence[Sequence[int]], measured: Measured) -> float:
    devices = [measured.devices[group[0]] if measured.devices else 0 for group in indices]
    known: dict[tuple[int, int | None], float] = {}

    def cost(group: int, num_tokens: int | None) -> float:
        if (group, num_tokens) not in known:
            own = measured.costs[tuple(indices[group])]
            seconds = own.prompt if num_tokens is None else own.of(num_tokens)
            if devices[group] != 0:
                seconds += measured.link.of((num_tokens or 1) * measured.row_bytes)
            known[group, num_tokens] = seconds
        return known[group, num_tokens]

    total = 0.0
    for step in run.steps:
        busy: dict[int, float] = {}
        for group, counts in step.items():
            own = sum(cost(group, num_tokens) for num_tokens in counts)
            busy[devices[group]] = busy.get(devices[group], 0.0) + own
        total += max(busy.values(), default=0.0) + measured.outside * sum(map(len, step.values()))
    return total
