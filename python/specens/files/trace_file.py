"""The file that keeps what happened in each round of a generation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specens.decoding.trace import Round
from specens.files.json_lines import JsonLines, StreamLines, open_lines

if TYPE_CHECKING:
    from specens.generate import Generation

FORMAT = "specens trace 2"


class TraceFile:
    """JSON lines of what happens: a line about the run, one for each round, one for each finished text.

    A run that was ended and started again traces the texts that it had begun from their first round on.
    run: what to say about it. goes_on: whether the lines that are there stay.
    Raises ValueError where the file is there and is no trace.
    """

    def __init__(self, lines: JsonLines | StreamLines, run: dict[str, Any], *, goes_on: bool = False) -> None:
        self._lines = lines
        if not lines.is_new and (not lines.kept or lines.kept[0].get("format") != FORMAT):
            raise ValueError(f"{lines.path}: expected a new file for the trace, or an earlier trace; got another file")
        if not goes_on:
            lines.clear()
        if not lines.kept:
            lines.append({"line": "run", "format": FORMAT} | run)

    def write_round(self, of_text: Round) -> None:
        """Keep a round."""
        self._lines.append(of_text.to_dict())

    def write_text(self, generation: Generation, index: int = 0, sample: int = 0) -> None:
        """Keep the end of a text."""
        self._lines.append(
            {
                "line": "text",
                "index": index,
                "sample": sample,
                "seed": generation.seed,
                "finish_reason": generation.finish_reason,
                "statistics": generation.statistics.to_dict(),
            }
        )


@contextmanager
def traced(
    path: Path | None, run: dict[str, Any]
) -> Iterator[tuple[Callable[[Round], None] | None, Callable[[Generation], None]]]:
    """A new trace of one text: what to call in each round, and with the text; without a path nothing is kept."""
    if path is None:
        yield None, lambda _: None
        return
    with closing(open_lines(path)) as lines:
        file = TraceFile(lines, run)
        yield file.write_round, file.write_text
