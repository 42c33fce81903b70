"""Whether an operation reached its bars."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from bench.case import Bars
from bench.timing import Timing

RATIO, TIME, SPEEDUP = "ratio", "time", "speedup"


@dataclass(frozen=True)
class Outcome:
    """A bar and what was measured; kind is RATIO, TIME or SPEEDUP."""

    kind: str
    limit: float
    measured: float

    @property
    def met(self) -> bool:
        return self.measured >= self.limit if self.kind == SPEEDUP else self.measured <= self.limit


def outcomes(bars: Bars, timings: Mapping[str, Timing], operation: str, bound: str) -> list[Outcome]:
    """The bars that can be judged: a speed-up only beside a rival that was timed."""
    own = timings[operation]
    found = []
    if bars.ratio is not None:
        found.append(Outcome(RATIO, bars.ratio, statistics.median(own.ratios(timings[bound]))))
    if bars.seconds is not None:
        found.append(Outcome(TIME, bars.seconds, own.median))
    factors = [statistics.median(timings[name].ratios(own)) for name in bars.over if name in timings]
    if bars.speedup is not None and factors:
        found.append(Outcome(SPEEDUP, bars.speedup, min(factors)))
    return found
