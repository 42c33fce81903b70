"""What `specens generate` does with files: many prompts, texts as JSON lines, a trace, a progress bar."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from specens.batch_files import Piece, missing, open_texts, write_texts
from specens.jobs import draw_seed
from specens.json_lines import JsonLines
from specens.options import print_json
from specens.prompt_file import PromptLine, read_prompts
from specens.prompts import MemberPrompts
from specens.trace import TraceFile

if TYPE_CHECKING:
    from specens.generate import Generation, SpeculativeEnsemble


@dataclass(frozen=True)
class Files:
    """The files of a run: prompts, texts, what happened in each round; and how many texts at a time and a prompt."""

    input: Path | None = None
    output: Path | None = None
    trace: Path | None = None
    batch_size: int = 8
    samples: int = 1

    @property
    def are_many(self) -> bool:
        """Whether texts are written as JSON lines, and not one text for people."""
        return self.input is not None or self.output is not None or self.samples > 1


class FileRun:
    """Many texts, from what is there already to the last one.

    prompt: the only one where the files name none. job: the settings of all texts. settings: all that they depend on.
    Raises ValueError where the files do not suit the run, or each other.
    """

    def __init__(self, files: Files, job: dict[str, Any], settings: dict[str, Any]) -> None:
        self._files = files
        self._job = {name: value for name, value in job.items() if name not in ("prompt", "seed")}
        self._open = ExitStack()
        self._texts: JsonLines | None = None
        lines, seed = _lines(files, job["prompt"]), job["seed"]
        if files.output is not None:
            if files.input is not None and files.output.exists() and files.output.samefile(files.input):
                raise ValueError(f"--output: expected another file than --input, got {files.output}")
            self._texts, seed = open_texts(files.output, lines, settings, seed)
            self._open.callback(self._texts.close)
        first = draw_seed() if seed is None else seed
        self._total = len(lines) * files.samples
        kept = self._texts or _StandardOutput()
        self._pieces = missing(kept.kept, lines, files.samples, first)
        self._append = kept.append

    @property
    def num_there(self) -> int:
        """How many texts are written."""
        return self._total - len(self._pieces)

    def generate(self, ensemble: SpeculativeEnsemble, chat: bool, run: dict[str, Any], console: Console) -> None:
        """Write the missing texts. run: what the trace says about all of them.

        Raises as `write_texts`, with what is written added to the message where memory runs out.
        """
        num_written = self.num_there
        with self._open, text_progress(console, self._total, self.num_there) as advance:
            trace = self._open_trace(run)

            def note(piece: Piece, generation: Generation) -> None:
                nonlocal num_written
                num_written += 1
                advance(generation)
                if trace is not None:
                    trace.write_text(generation, piece.index, piece.sample)

            try:
                write_texts(
                    ensemble,
                    self._pieces,
                    self._append,
                    batch_size=self._files.batch_size,
                    on_text=note,
                    on_round=None if trace is None else trace.write_round,
                    **self._job | {"chat": chat},
                )
            except (KeyboardInterrupt, MemoryError) as error:
                raise type(error)(self._report(error, num_written)) from error

    def _open_trace(self, run: dict[str, Any]) -> TraceFile | None:
        if self._files.trace is None:
            return None
        lines = self._open.enter_context(JsonLines(self._files.trace))
        return TraceFile(lines, run, goes_on=self.num_there > 0)

    def _report(self, error: BaseException, num_written: int) -> str:
        what = "interrupted" if isinstance(error, KeyboardInterrupt) else f"out of memory ({error})"
        again = "the same command writes the others" if self._texts is not None else "--output keeps them"
        smaller = ", perhaps with a smaller --batch-size" if isinstance(error, MemoryError) else ""
        return f"{what}: {num_written} of {self._total} texts are written; {again}{smaller}"


class _StandardOutput:
    """In place of a file of texts."""

    kept: tuple[dict, ...] = ()

    @staticmethod
    def append(values: dict) -> None:
        print_json(values)
        sys.stdout.flush()


def _lines(files: Files, prompt: Any) -> list[PromptLine]:
    if files.input is not None:
        return read_prompts(files.input)
    values = {"member_prompts": list(prompt.prompts)} if isinstance(prompt, MemberPrompts) else {"prompt": prompt}
    return [PromptLine(values, "--prompt")]


@contextmanager
def text_progress(console: Console, total: int, done: int) -> Iterator[Any]:
    """A progress bar of texts; gives a function to be called with each finished Generation."""
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    with Progress(*columns, console=console, transient=False) as progress:
        bar: TaskID = progress.add_task("texts", total=total, completed=done)
        num_tokens = 0

        def advance(generation: Generation) -> None:
            nonlocal num_tokens
            num_tokens += len(generation.tokens)
            seconds = progress.tasks[0].elapsed or 0.0
            rate = f", {num_tokens / seconds:.1f} tokens/s" if seconds else ""
            progress.update(bar, advance=1, description=f"texts{rate}")

        yield advance
