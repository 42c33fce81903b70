"""How far a run is, on standard error: a line that changes on a terminal, and elsewhere a new one now and then."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

FIRST_GAP, LONGEST_GAP = 1.0, 60.0  # seconds between lines; each gap is twice the one before
SILENT_SECONDS = 10.0  # before the first line about what is seldom worth one, where there is no terminal


class Progress:
    """What is being done, and how many of `total` steps are."""

    def __init__(self, text: str, total: int | None, done: int) -> None:
        self.text = text
        self.total = total
        self.done = done
        self.started = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self.started

    def say(self, text: str, advance: int = 0) -> None:
        """Tell what is being done now, and that so many more steps are."""
        self.text = text
        self.done += advance

    def __str__(self) -> str:
        steps = "" if self.total is None else f"{self.done} of {self.total}, "
        return f"{self.text} ({steps}{self.seconds:.0f} s)"


@contextmanager
def progress(
    console: Console, text: str, total: int | None = None, *, done: int = 0, first: float | None = None
) -> Iterator[Progress]:
    """Show a Progress until the block ends. first: the seconds before the first line, where there is no terminal."""
    shown = _Shown(console, text, total, done) if console.is_terminal else Progress(text, total, done)
    over = threading.Event()
    lines = threading.Thread(target=_print_lines, args=(console, shown, over, first or FIRST_GAP), daemon=True)
    with shown.bar if isinstance(shown, _Shown) else _running(lines, over):
        yield shown


class _Shown(Progress):
    """Also on a terminal."""

    def __init__(self, console: Console, text: str, total: int | None, done: int) -> None:
        super().__init__(text, total, done)
        steps = [] if total is None else [BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
        words = TextColumn("{task.description}", markup=False)
        self.bar = Bar(SpinnerColumn(), words, *steps, console=console, transient=True)
        self._task = self.bar.add_task(text, total=total, completed=done)

    def say(self, text: str, advance: int = 0) -> None:
        super().say(text, advance)
        self.bar.update(self._task, description=text, completed=self.done)


@contextmanager
def loading(console: Console, text: str) -> Iterator[None]:
    """Show what the loading of models says of itself until the block ends: its steps, and its warnings for good."""
    logger = logging.getLogger("specens.engines.transformers.load")
    with progress(console, text, first=SILENT_SECONDS) as shown:
        handler, level = _Told(console, shown), logger.level
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)


class _Told(logging.Handler):
    """Takes what is logged as what is being done now."""

    def __init__(self, console: Console, shown: Progress) -> None:
        super().__init__(logging.INFO)
        self._console, self._shown = console, shown

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if record.levelno > logging.INFO:
            self._console.print(message, style="yellow", highlight=False, markup=False, emoji=False, soft_wrap=True)
        else:
            self._shown.say(message)


@contextmanager
def _running(lines: threading.Thread, over: threading.Event) -> Iterator[None]:
    lines.start()
    try:
        yield
    finally:
        over.set()
        lines.join()


def _print_lines(console: Console, shown: Progress, over: threading.Event, gap: float) -> None:
    while not over.wait(gap):
        try:
            console.print(str(shown), style="dim", highlight=False, markup=False, emoji=False, soft_wrap=True)
        except OSError:  # nobody reads it
            return
        gap = min(2 * gap, LONGEST_GAP)
