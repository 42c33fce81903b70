"""Interleaved timing of several functions in one process."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from bench.case import Run

SAMPLE_SECONDS = 3e-4  # calls that are shorter are timed several at once
WARM_UP_SECONDS = 0.02
MAX_CALLS = 1000
SLOW_SECONDS = 0.05  # longer calls do not gain from caches that are warm


@dataclass(frozen=True)
class Effort:
    """How long to measure: until `seconds` have passed, but at least `min_rounds` and at most `max_rounds`."""

    seconds: float
    min_rounds: int
    max_rounds: int


FULL = Effort(seconds=1.2, min_rounds=7, max_rounds=400)
QUICK = Effort(seconds=0.2, min_rounds=5, max_rounds=50)


@dataclass(frozen=True)
class Pace:
    """calls: timed together as one sample. warm: whether an untimed call comes before, to bring the inputs back into
    the caches that the function before has used."""

    calls: int
    warm: bool


@dataclass(frozen=True)
class Timing:
    """Seconds a call, one entry a round; rounds of all functions of a case are taken side by side."""

    samples: list[float]
    calls: int

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def spread(self) -> tuple[float, float]:
        """The 10th and the 90th percentile."""
        return deciles(self.samples)

    def ratios(self, other: Timing) -> list[float]:
        """This function's time over the other's, round by round: a disturbance that lasts hits both."""
        return [own / its for own, its in zip(self.samples, other.samples, strict=True)]


def deciles(samples: list[float]) -> tuple[float, float]:
    cuts = statistics.quantiles(samples, n=10, method="inclusive")
    return cuts[0], cuts[-1]


def interleave(runs: Mapping[str, Run], effort: Effort) -> dict[str, Timing]:
    """Time each function once a round, in an order that rotates from round to round."""
    paces = {name: _pace_of(run) for name, run in runs.items()}
    samples: dict[str, list[float]] = {name: [] for name in runs}
    order = list(runs)
    with _no_garbage_collection():
        deadline = time.perf_counter() + effort.seconds
        for rounds in range(effort.max_rounds):
            if rounds >= effort.min_rounds and time.perf_counter() >= deadline:
                break
            for name in order:
                samples[name].append(_sample(runs[name], paces[name]))
            order = order[1:] + order[:1]
    return {name: Timing(samples[name], paces[name].calls) for name in runs}


def _pace_of(run: Run) -> Pace:
    if _seconds(run, 1) >= SLOW_SECONDS:
        return Pace(calls=1, warm=False)
    begin, count = time.perf_counter(), 0
    while count == 0 or time.perf_counter() - begin < WARM_UP_SECONDS:
        run()
        count += 1
    seconds = (time.perf_counter() - begin) / count
    return Pace(calls=min(MAX_CALLS, max(1, math.ceil(SAMPLE_SECONDS / seconds))), warm=True)


def _sample(run: Run, pace: Pace) -> float:
    if pace.warm:
        run()
    return _seconds(run, pace.calls) / pace.calls


def _seconds(run: Run, calls: int) -> float:
    begin = time.perf_counter()
    for _ in range(calls):
        run()
    return time.perf_counter() - begin


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
