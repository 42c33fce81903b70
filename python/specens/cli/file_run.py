"""What `specens generate` does with files: many prompts, texts as JSON lines, a trace, a progress bar."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from specens.cli.options import check_file
from specens.cli.progress import progress
from specens.files.batch_files import Piece, missing, open_texts, write_texts
from specens.files.json_lines import STANDARD, JsonLines, StreamLines, check_index, is_stream, open_lines
from specens.files.prompt_file import PromptLine, read_prompts
from specens.files.trace_file import TraceFile
from specens.files.workers import Workers
from specens.settings.jobs import draw_seed
from specens.settings.prompts import MemberPrompts

if TYPE_CHECKING:
    from specens.generate import Generation, SpeculativeEnsemble


@dataclass(frozen=True)
class Files:
    """The files of a run: prompts, texts, what happened in each round; how many texts at a time and a prompt.

    exact: as of `SpeculativeEnsemble.generate_many`.
    """

    input: Path | None = None
    output: Path | None = None
    trace: Path | None = None
    batch_size: int = 8
    samples: int = 1
    exact: bool = False

    @property
    def are_many(self) -> bool:
        """Whether texts are written as JSON lines, and not one text for people."""
        return self.input is not None or self.output is not None or self.samples > 1

    def check(self) -> None:
        """Raise ValueError where something cannot be written, or would spoil what is written or read beside it."""
        if self.input is not None:
            check_file("--input", self.input)
        for option, path in (("--output", self.output), ("--trace", self.trace)):
            if path is not None:
                check_index(option, path)
        if self.trace is not None and _is_same(self.trace, self.output or STANDARD):
            raise ValueError(f"--trace: expected another place than that of the texts, got {self.trace}")
        for option, path in (("--output", self.output), ("--trace", self.trace)):
            if path not in (None, STANDARD) and _is_same(path, self.input):
                raise ValueError(f"{option}: expected another file than --input, got {path}")


class FileRun:
    """Many texts, from what is there already to the last one.

    job: the settings of all texts, and the only prompt where the files name none. settings: all that they depend on.
    told: as of `open_texts`. Raises ValueError where the files do not suit the run, or each other.
    """

    def __init__(
        self,
        files: Files,
        job: dict[str, Any],
        settings: dict[str, Any],
        told: Callable[[str, Any], tuple[str, str]],
    ) -> None:
        self._files = files
        self._job = {name: value for name, value in job.items() if name not in ("prompt", "seed")}
        self._open = ExitStack()
        self._texts: JsonLines | StreamLines
        lines, seed = _lines(files, job["prompt"]), job["seed"]
        if files.output is None or is_stream(files.output):
            self._texts = StreamLines(files.output or STANDARD)
        else:
            self._texts, seed = open_texts(files.output, lines, settings, seed, told)
        self._open.callback(self._texts.close)
        self._total = len(lines) * files.samples
        self._pieces = missing(self._texts.kept, lines, files.samples, draw_seed() if seed is None else seed)

    @property
    def num_there(self) -> int:
        """How many texts are written."""
        return self._total - len(self._pieces)

    def generate(
        self, ensemble: SpeculativeEnsemble | Workers, chat: bool, run: dict[str, Any], console: Console
    ) -> None:
        """Write the missing texts. run: what the trace says about all of them.

        Raises as `write_texts`, with what is written added to the message where memory runs out.
        """
        num_tokens = 0
        with self._open, progress(console, "texts", self._total, done=self.num_there) as shown:
            trace = self._open_trace(run)

            def note(piece: Piece, generation: Generation) -> None:
                nonlocal num_tokens
                num_tokens += len(generation.tokens)
                shown.say(f"texts, {num_tokens / shown.seconds:.1f} tokens/s", advance=1)
                if trace is not None:
                    trace.write_text(generation, piece.index, piece.sample)

            try:
                write_texts(
                    ensemble,
                    self._pieces,
                    self._texts.append,
                    batch_size=self._files.batch_size,
                    exact=self._files.exact,
                    on_text=note,
                    on_round=None if trace is None else trace.write_round,
                    **self._job | {"chat": chat},
                )
            except (KeyboardInterrupt, MemoryError) as error:
                raise type(error)(self._report(error, shown.done)) from error
        rate = f", {num_tokens / shown.seconds:.1f} tokens/s" if num_tokens else ""
        console.print(f"{self._total} text{'s' * (self._total != 1)}{rate}", style="dim", highlight=False)

    def _open_trace(self, run: dict[str, Any]) -> TraceFile | None:
        if self._files.trace is None:
            return None
        lines = self._open.enter_context(closing(open_lines(self._files.trace)))
        return TraceFile(lines, run, goes_on=self.num_there > 0)

    def _report(self, error: BaseException, num_written: int) -> str:
        what = "interrupted" if isinstance(error, KeyboardInterrupt) else f"out of memory ({error})"
        again = "the same command writes the others" if isinstance(self._texts, JsonLines) else "--output keeps them"
        smaller = ", perhaps with a smaller --batch-size" if isinstance(error, MemoryError) else ""
        return f"{what}: {num_written} of {self._total} texts are written; {again}{smaller}"


def _is_same(first: Path | None, second: Path | None) -> bool:
    if first is None or second is None:
        return False
    return first == second or (first.exists() and second.exists() and first.samefile(second))


def _lines(files: Files, prompt: Any) -> list[PromptLine]:
    if files.input is not None:
        return read_prompts(files.input)
    values = {"member_prompts": list(prompt.prompts)} if isinstance(prompt, MemberPrompts) else {"prompt": prompt}
    return [PromptLine(values, "--prompt")]
