"""Rows that lie in a file as soon as each is measured, so that a bench that was ended goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def read(path: Path) -> list[Row]:
    """The rows of a file; none where there is no file yet. Half a line at its end, of a run that was killed, is cut."""
    if not path.exists():
        return []
    whole, _, rest = path.read_text().rpartition("\n")
    if rest:
        path.write_text(f"{whole}\n" if whole else "")
    return [json.loads(line) for line in whole.splitlines()]


def append(path: Path, row: Row) -> None:
    """Add a row, in a folder that may have to be made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as lines:
        lines.write(json.dumps(row) + "\n")


def missing(wanted: Iterable[Row], found: Iterable[Row]) -> list[Row]:
    """Those that no row found has all fields of, with their values."""
    found = list(found)
    return [row for row in wanted if not any(row.items() <= other.items() for other in found)]
