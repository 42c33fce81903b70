"""Tables for people, JSON lines for machines."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.table import Table

from bench.timing import Timing, deciles

NOTE = (
    "Medians. x: ratio to {}, the median over rounds (10th..90th percentile). "
    "Each result was compared with the reference's before it was timed."
)


@dataclass(frozen=True)
class Row:
    """A case as measured. timings holds the bounds, the operation (by its backend's name) and the rivals.

    near_ties: by whom, requests that fell on the other side of an edge by rounding.
    faults: what is wrong with a rival's result, or why it failed; one that failed is not timed.
    """

    shape: dict[str, int]
    setting: dict[str, Any]
    dtype: str
    bounds: tuple[str, ...]
    operation: str
    bytes_needed: int
    near_ties: dict[str, int]
    faults: dict[str, str]
    timings: dict[str, Timing]

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys((*self.timings, *self.faults)))

    @property
    def rivals(self) -> list[str]:
        return [name for name in self.timings if name not in self.bounds and name != self.operation]

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

    def write(self, room: str, row: Row) -> None:
        if self.file is None:
            return
        for name in row.names:
            self.file.write(json.dumps(_record(room, row, name) | {"environment": self.facts}) + "\n")
        self.file.flush()


def _record(room: str, row: Row, name: str) -> dict[str, Any]:
    kind = "bound" if name in row.bounds else "operation" if name == row.operation else "rival"
    return {
        "room": room,
        **row.shape,
        **row.setting,
        "dtype": row.dtype,
        "name": name,
        "kind": kind,
        "bytes_needed": row.bytes_needed,
        "near_ties": row.near_ties.get(name),  # None: not compared
        "fault": row.faults.get(name),
        **(_times(row, name) if name in row.timings else {}),
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


def list_rooms(console: Console, rooms: dict[str, str]) -> None:
    for name, summary in rooms.items():
        console.print(f"[bold]{name:16}[/] {summary.partition(': ')[2]}", highlight=False)


def print_environment(console: Console, facts: dict[str, Any]) -> None:
    console.print(", ".join(f"{key} {value}" for key, value in facts.items()), highlight=False, soft_wrap=True)


def print_table(console: Console, title: str, rows: list[Row]) -> None:
    if not rows:
        return
    described = [row.shape | row.setting | {"dtype": row.dtype} for row in rows]
    varying = [key for key in described[0] if len({str(case[key]) for case in described}) > 1]
    constant = [f"{key} {value}" for key, value in described[0].items() if key not in varying and value != "-"]
    names = list(dict.fromkeys(name for row in rows for name in row.names))
    table = Table(box=box.MARKDOWN)
    for key in (*varying, *names):
        table.add_column(key.replace("_", " "), justify="right")
    for row, case in zip(rows, described, strict=True):
        table.add_row(*(str(case[key]) for key in varying), *(_cell(row, name) for name in names))
    console.print(f"[bold]{title}[/] {', '.join(constant)}", highlight=False)
    console.print(table, highlight=False)
    console.print(NOTE.format(rows[0].bounds[0]), highlight=False)


def _cell(row: Row, name: str) -> str:
    """The median time, its ratio to the bound and, for the operation, how that ratio spreads."""
    if name not in row.timings:
        return "failed" if name in row.faults else "-"
    text = _readable(row.timings[name].median)
    if name == row.bounds[0]:
        return text
    ratios = row.ratios(name)
    text += f" {statistics.median(ratios):.3g}x"
    if name == row.operation:
        low, high = deciles(ratios)
        text += f" ({low:.3g}..{high:.3g})"
    return text + (" wrong" if name in row.faults else "")


def _readable(seconds: float) -> str:
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
            f"{name} takes {min(times):.3g} to {max(times):.3g} times as long as {rows[0].operation} "
            f"(median {statistics.median(times):.3g}, {len(times)} cases)",
            highlight=False,
        )
    for row in rows:
        for name, count in row.near_ties.items():
            if count:
                console.print(f"{name}, {row.shape}: {count} near ties fell on the other side", highlight=False)
        for name, fault in row.faults.items():
            console.print(f"{name}, {row.shape}: {fault}", style="red", highlight=False, markup=False)


def print_missing_peers(console: Console, missing: dict[str, str]) -> None:
    for name, reason in missing.items():
        console.print(f"not installed: {name} ({reason})", highlight=False)
