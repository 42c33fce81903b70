"""How a bench that counts, rather than times, shows what it found."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table


def print_counts(table: Table, missed: Sequence[str], width: int) -> int:
    """Print a table and the bars that were missed; how many."""
    console = Console(width=width)
    console.print(table)
    for line in missed or ["every bar is met"]:
        console.print(line, highlight=False)
    return len(missed)
