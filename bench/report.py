"""Tables for people, JSON lines for machines."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.table import Table

from bench.bars import RATIO, SPEEDUP, TIME, Outcome, outcomes
from bench.case import Bars
from bench.timing import Timing, deciles

NOTE = (
    "Medians. x: ratio to {}, the median over rounds (10th..90th percentile). "
    "Before it was timed each result was compared with the reference's or, where a rival draws random numbers of its "
    "own, the frequencies of its tokens with the target distribution. -: does not serve the case."
)
BAR_TITLES = {RATIO: "bar", TIME: "bar", SPEEDUP: "over PyTorch"}


@dataclass(frozen=True)
class Row:
    """A case as measured. timings holds the bounds, the operation (by its backend's name) and the rivals.

    near_ties: by whom, requests that fell on the other side of an edge by rounding.
    faults: what is wrong with a rival's result, or why it failed; one that failed is not timed.
    bars: what the operation should reach. table: the title of the table.
    """

    shape: dict[str, int]
    setting: dict[str, Any]
    dtype: str
    bounds: tuple[str, ...]
    operation: str
    bytes_needed: int
    near_ties: dict[str, int]
    faults: dict[str, str]
    bars: Bars
    table: str
    timings: dict[str, Timing]

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys((*self.timings, *self.faults)))

    @property
    def rivals(self) -> list[str]:
        return [name for name in self.timings if name not in self.bounds and name != self.operation]

    @property
    def outcomes(self) -> list[Outcome]:
        """Of the bars; a rival with a fault sets none."""
        sound = {name: timing for name, timing in self.timings.items() if name not in self.faults}
        return outcomes(self.bars, sound, self.operation, self.bounds[0])

    def ratios(self, name: str) -> list[float]:
        return self.timings[name].ratios(self.timings[self.bounds[0]])


class JsonLines:
    """A file with a line for each name of each row, written as it is measured; nothing without a path."""

    def __init__(self, path: Path | None, facts: dict[str, Any]) -> None:
        self.path = path
        self.facts = facts
        self.file: TextIO | None = None

    def __enter__(self) -> JsonLines:
        if self.path is not None:
            self.file = self.path.open("w", encoding="utf-8")
        return self

    def __exit__(self, *error: object) -> None:
        if self.file is not None:
            self.file.close()

    def write(self, operation: str, row: Row) -> None:
        if self.file is None:
            return
        for name in row.names:
            self.file.write(json.dumps(_record(operation, row, name) | {"environment": self.facts}) + "\n")
        self.file.flush()


def _record(operation: str, row: Row, name: str) -> dict[str, Any]:
    kind = "bound" if name in row.bounds else "operation" if name == row.operation else "rival"
    return {
        "operation": operation,
        **row.shape,
        **row.setting,
        "dtype": row.dtype,
        "name": name,
        "kind": kind,
        "bytes_needed": row.bytes_needed,
        "table": row.table,
        "near_ties": row.near_ties.get(name),  # None: not compared
        "fault": row.faults.get(name),
        **(_times(row, name) if name in row.timings else {}),
        **({"bars": [asdict(bar) | {"met": bar.met} for bar in row.outcomes]} if kind == "operation" else {}),
    }


def _times(row: Row, name: str) -> dict[str, Any]:
    timing, ratios = row.timings[name], row.ratios(name)
    low, high = timing.spread
    ratio_low, ratio_high = deciles(ratios)
    return {
        "median_s": timing.median,
        "p10_s": low,
        "p90_s": high,
        "ratio_to": row.bounds[0],
        "ratio": statistics.median(ratios),
        "ratio_p10": ratio_low,
        "ratio_p90": ratio_high,
        "rounds": len(timing.samples),
        "calls_per_round": timing.calls,
    }


def list_operations(console: Console, operations: dict[str, str]) -> None:
    for name, summary in operations.items():
        console.print(f"[bold]{name:16}[/] {summary.partition(': ')[2]}", highlight=False)


def print_environment(console: Console, facts: dict[str, Any]) -> None:
    console.print(", ".join(f"{key} {value}" for key, value in facts.items()), highlight=False, soft_wrap=True)


def print_tables(console: Console, operation: str, rows: list[Row]) -> None:
    for title in dict.fromkeys(row.table for row in rows):
        _print_table(console, f"{operation} {title}".strip(), [row for row in rows if row.table == title])
    if rows:
        console.print(NOTE.format(rows[0].bounds[0]), highlight=False)


def _print_table(console: Console, title: str, rows: list[Row]) -> None:
    described = [row.shape | row.setting | {"dtype": row.dtype} for row in rows]
    varying = [key for key in described[0] if len({str(case[key]) for case in described}) > 1]
    constant = [f"{key} {value}" for key, value in described[0].items() if key not in varying and value != "-"]
    names = list(dict.fromkeys(name for row in rows for name in row.names))
    kinds = list(dict.fromkeys(bar.kind for row in rows for bar in row.outcomes))
    table = Table(box=box.MARKDOWN)
    for key in (*varying, *names, *(BAR_TITLES[kind] for kind in kinds)):
        table.add_column(key.replace("_", " "), justify="right")
    for row, case in zip(rows, described, strict=True):
        cells = (*(_cell(row, name) for name in names), *(_bar_cell(row, kind) for kind in kinds))
        table.add_row(*(str(case[key]) for key in varying), *cells)
    console.print(f"[bold]{title}[/]: {', '.join(constant)}", highlight=False)
    console.print(table, highlight=False)


def _bar_cell(row: Row, kind: str) -> str:
    bar = next((bar for bar in row.outcomes if bar.kind == kind), None)
    return "-" if bar is None else f"{_limit(bar)} {'met' if bar.met else 'missed'}"


def _limit(bar: Outcome) -> str:
    """The bar, and what was measured where no other column shows it."""
    if bar.kind == SPEEDUP:
        return f"{_short(bar.measured)} >= {bar.limit:g}"
    return f"<= {_readable(bar.limit)}" if bar.kind == TIME else f"<= {bar.limit:g}x"


def _cell(row: Row, name: str) -> str:
    """The median time, its ratio to the bound and, for the operation, how that ratio spreads."""
    if name not in row.timings:
        return "failed" if name in row.faults else "-"
    text = _readable(row.timings[name].median)
    if name == row.bounds[0]:
        return text
    ratios = row.ratios(name)
    text += f" {_short(statistics.median(ratios))}x"
    if name == row.operation:
        low, high = deciles(ratios)
        text += f" ({_short(low)}..{_short(high)})"
    return text + (" wrong" if name in row.faults else "")


def _short(factor: float) -> str:
    return f"{factor:.0f}" if factor >= 100 else f"{factor:.3g}"


def _readable(seconds: float) -> str:
    if seconds >= 0.9995:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e6:.3g} us" if seconds < 0.9995e-3 else f"{seconds * 1e3:.3g} ms"


def print_summary(console: Console, rows: list[Row]) -> None:
    """How many times as long as the operation each rival takes, and what went differently from the reference."""
    for name in dict.fromkeys(name for row in rows for name in row.rivals):
        times = [
            statistics.median(row.timings[name].ratios(row.timings[row.operation]))
            for row in rows
            if name in row.timings
        ]
        console.print(
            f"{name} takes {_short(min(times))} to {_short(max(times))} times as long as {rows[0].operation} "
            f"(median {_short(statistics.median(times))}, {len(times)} cases)",
            highlight=False,
        )
    bars = [bar for row in rows for bar in row.outcomes]
    if bars:
        console.print(f"{sum(bar.met for bar in bars)} of {len(bars)} bars met", highlight=False)
    _print_differences(console, rows)


def _print_differences(console: Console, rows: list[Row]) -> None:
    faults: dict[str, list[Row]] = {}
    for row in rows:
        for name, count in row.near_ties.items():
            if count:
                console.print(f"{name}, {row.shape}: {count} near ties fell on the other side", highlight=False)
        for name, fault in row.faults.items():
            faults.setdefault(f"{name}: {fault}", []).append(row)
    for text, where in faults.items():
        cases = str(where[0].shape) if len(where) == 1 else f"{len(where)} cases"
        console.print(f"{text} ({cases})", style="red", highlight=False, markup=False)


def print_missing_peers(console: Console, missing: dict[str, str]) -> None:
    for name, reason in missing.items():
        console.print(f"not installed: {name} ({reason})", highlight=False)
