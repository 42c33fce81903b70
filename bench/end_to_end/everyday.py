"""What users would pick, beside each other: the same model, prompts and settings in each engine.

python -m bench.end_to_end.everyday [--vllm .venv-vllm/bin/python] [--llamacpp .venv-llamacpp/bin/python]

SmolLM2-135M-Instruct, drafts by prompt lookup: transformers, the same with `enable()`, the driver, vLLM on CPUs without
and with the plug-in, llama.cpp with its own lookup. Each engine runs in a process of its own. Told
are tokens a second, what passes outside of forwards, whether the seed gives the text that it gives without drafts, and
whether first tokens have the model's law (chi-square). What fails, or is not installed, is a row that says so. Rows are
written as they are measured, and those that are there are not measured again: a run that was ended goes on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from bench.end_to_end.everyday_engines import ENGINES, model_law, prompt_ids, rows_of
from bench.end_to_end.rows import Row, append, missing, read

HEAD = ("engine", "drafts", "settings", "tokens/s", "outside, ms a token", "seed gives its text", "law of first tokens")
UNLIKELY = 1e-4  # below this probability a law is told to be another one
VLLM, LLAMACPP = Path(".venv-vllm/bin/python"), Path(".venv-llamacpp/bin/python")
RESULTS = Path(__file__).parents[1] / "results/everyday-cpu.jsonl"
MODELS, ANOTHER = "the model's", "another one"
SECONDS = 1800  # of one engine


def main(
    tokens: Annotated[int, typer.Option(min=2, help="New tokens of a run.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of a setting, each with a seed of its own.")] = 3,
    samples: Annotated[int, typer.Option(min=0, help="First tokens that the law is judged by.")] = 200,
    threads: Annotated[int, typer.Option(min=1, help="Of each engine.")] = 2,
    vllm: Annotated[Path, typer.Option(help="A Python with vLLM and this package: make test-vllm.")] = VLLM,
    llamacpp: Annotated[Path, typer.Option(help="A Python with llama-cpp-python: make test-llamacpp.")] = LLAMACPP,
    engine: Annotated[list[str] | None, typer.Option(help="Only these engines.")] = None,
    json_path: Annotated[Path, typer.Option("--json", help="Where rows are written as they are measured.")] = RESULTS,
    again: Annotated[bool, typer.Option("--again", help="Drop the rows that are there, and measure all.")] = False,
) -> None:
    """Run every engine, print a table, and write what was measured."""
    pythons = {"here": Path(sys.executable), "vllm": vllm, "llamacpp": llamacpp}
    job = {"tokens": tokens, "repeats": repeats, "samples": samples, "threads": threads, "prompt": prompt_ids()}
    if unknown := [name for name in engine or () if name not in ENGINES]:
        raise typer.BadParameter(f"--engine: expected {', '.join(ENGINES)}, got {', '.join(unknown)}")
    if again:
        json_path.unlink(missing_ok=True)
    names, problems = engine or list(ENGINES), []
    for name in names:
        rows = missing(rows_of(name, job), read(json_path))
        problem = run_engine(pythons[ENGINES[name].python], job | {"rows": rows}, json_path) if rows else None
        problems += [] if problem is None else [{"engine": name, "problem": problem}]
    wanted = [row for name in names for row in rows_of(name, job)]
    judge(wanted, job, json_path)
    wanted += [law_row(row) for row in wanted if row["kind"] == "first"]
    found = [row for row in read(json_path) if any(one.items() <= row.items() for one in wanted)]
    print(table([*found, *problems]))


def law_row(row: Row) -> Row:
    """The row that says which law the first tokens of a row have."""
    return row | {"kind": "law"}


def judge(wanted: list[Row], job: Row, path: Path) -> None:
    """Write, for each row of first tokens that has none yet, a row that says whether they have the model's law."""
    found = read(path)
    rows = [row for row in wanted if row["kind"] == "first" and missing([law_row(row)], found)]
    drawn = [(row, run["first"]) for row in rows for run in found if row.items() <= run.items()]
    if drawn:
        law = model_law(job)
        for row, first in drawn:
            append(path, law_row(row) | {"told": judged(first, law[row["settings"]])})


def run_engine(python: Path, job: Row, out: Path) -> str | None:
    """Measure rows of one engine, in a process of its own that writes them; why there are not all of them."""
    if not python.exists():
        return f"not installed: {python}"
    from bench.environment import environment

    settings = ENGINES[job["rows"][0]["engine"]].environment
    settings = settings | {"OMP_NUM_THREADS": str(job["threads"]), "OMP_WAIT_POLICY": "passive"}
    try:
        done = subprocess.run(
            [python, "-m", "bench.end_to_end.everyday_engines"],
            input=json.dumps(job | {"out": str(out.absolute()), "facts": environment()}),
            env=os.environ | settings,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"not finished in {SECONDS} s: the same command goes on"
    said = [line for line in done.stderr.splitlines() if line.strip()]
    return None if done.returncode == 0 else f"ended: {said[-1][:80] if said else done.returncode}"


def table(runs: list[Row]) -> str:
    """A table of Markdown: a row for each engine, source of drafts and setting."""
    from rich.console import Console
    from rich.table import Table

    shown = Table(*HEAD)
    keys = dict.fromkeys((run["engine"], run["drafts"], run["settings"]) for run in runs if "drafts" in run)
    for engine, drafts, settings in keys:
        own = [
            run for run in runs if (run["engine"], run.get("drafts"), run.get("settings")) == (engine, drafts, settings)
        ]
        shown.add_row(engine, drafts, settings, *_cells(own, _texts(runs, engine, settings)))
    for run in runs:
        if "problem" in run:
            shown.add_row(run["engine"], run["problem"])
    console = Console(width=160)
    with console.capture() as capture:
        console.print(shown)
    return capture.get()


def _texts(runs: list[Row], engine: str, settings: str) -> dict[int, list[int]]:
    """The texts of the engine without drafts, by their seeds."""
    plain = ENGINES[engine].without_drafts
    found = [run for run in runs if run.get("kind") == "text" and (run["engine"], run["settings"]) == (plain, settings)]
    return {run["seed"]: run["text"] for run in found if run["drafts"] == "none"}


def _cells(own: list[Row], plain: dict[int, list[int]]) -> list[str]:
    texts = [run for run in own if run["kind"] == "text"]
    rate = median(len(run["text"]) / run["seconds"] for run in texts)
    outside = [run["outside_ms"] for run in texts if run["outside_ms"] is not None]
    compared = [run["text"] == plain[run["seed"]] for run in texts if run["seed"] in plain]
    laws = [run["told"] for run in own if run["kind"] == "law"]
    return [
        f"{rate:.1f}",
        f"{median(outside):.1f}" if outside else "not known",
        f"{sum(compared)} of {len(compared)}" if compared else "-",
        ", ".join(laws) or "-",
    ]


def judged(tokens: list[int], law: dict[str, float]) -> str:
    """Whether tokens are drawn from a law, by Pearson's chi-square over the tokens expected at least five times."""
    from scipy.stats import chisquare

    counts, size = Counter(tokens), len(tokens)
    often = [token for token, chance in law.items() if chance * size >= 5]
    if not often:
        return "too few samples"
    observed = [counts[int(token)] for token in often]
    expected = [law[token] * size for token in often]
    observed, expected = [*observed, size - sum(observed)], [*expected, size - sum(expected)]
    if expected[-1] < 1e-6:
        if observed[-1]:
            return f"{ANOTHER}: tokens of probability 0"
        observed, expected = observed[:-1], expected[:-1]
    if len(expected) < 2:
        return "one token"
    chance = float(chisquare(observed, expected, sum_check=False).pvalue)
    return f"{MODELS if chance > UNLIKELY else ANOTHER} (p {chance:.2g})"


if __name__ == "__main__":
    typer.run(main)
