"""What users would pick, beside each other: the same model, prompts and settings in each engine.

python -m bench.end_to_end.everyday [--vllm .venv-vllm/bin/python] [--llamacpp .venv-llamacpp/bin/python] [--json FILE]

SmolLM2-135M-Instruct, drafts by prompt lookup: transformers, the same with `enable()`, the driver, vLLM on CPUs without
and with the plug-in, llama.cpp with its own lookup. Each engine runs in a process of its own. Told
are tokens a second, what passes outside of forwards, whether the seed gives the text that it gives without drafts, and
whether first tokens have the model's law (chi-square). What fails, or is not installed, is a row that says so.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from bench.end_to_end.everyday_engines import ENGINES, model_law, prompt_ids

HEAD = ("engine", "drafts", "settings", "tokens/s", "outside, ms a token", "seed gives its text", "law of first tokens")
UNLIKELY = 1e-4  # below this probability a law is told to be another one
VLLM, LLAMACPP = Path(".venv-vllm/bin/python"), Path(".venv-llamacpp/bin/python")
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
    json_path: Annotated[Path | None, typer.Option("--json", help="Write one JSON line for each run.")] = None,
) -> None:
    """Run every engine, print a table, and write what was measured."""
    from bench.environment import environment

    pythons = {"here": Path(sys.executable), "vllm": vllm, "llamacpp": llamacpp}
    job = {"tokens": tokens, "repeats": repeats, "samples": samples, "threads": threads, "prompt": prompt_ids()}
    runs: list[dict[str, Any]] = []
    for name in engine or ENGINES:
        found, problem = run_engine(name, pythons[ENGINES[name].python], job)
        runs += found
        if problem is not None:
            runs.append({"engine": name, "problem": problem})
    law = model_law(job) if samples else {}
    if json_path is not None:
        lines = [environment() | job, *runs, {"law": law}]
        json_path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    print(table(runs, law))


def run_engine(name: str, python: Path, job: dict[str, Any]) -> tuple[list[dict[str, Any]], str | None]:
    """The runs of one engine, and why there are no more of them."""
    if not python.exists():
        return [], f"not installed: {python}"
    settings = ENGINES[name].environment | {"OMP_NUM_THREADS": str(job["threads"]), "OMP_WAIT_POLICY": "passive"}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "runs.jsonl"
        done = subprocess.run(
            [python, "-m", "bench.end_to_end.everyday_engines"],
            input=json.dumps(job | {"engine": name, "out": str(out)}),
            env=os.environ | settings,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        runs = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    said = [line for line in done.stderr.splitlines() if line.strip()]
    return runs, None if done.returncode == 0 else f"ended: {said[-1][:80] if said else done.returncode}"


def table(runs: list[dict[str, Any]], law: dict[str, dict[str, float]]) -> str:
    """A table of Markdown: a row for each engine, source of drafts and setting."""
    from rich.console import Console
    from rich.table import Table

    shown = Table(*HEAD)
    keys = dict.fromkeys((run["engine"], run["drafts"], run["settings"]) for run in runs if "drafts" in run)
    for engine, drafts, settings in keys:
        own = [
            run for run in runs if (run["engine"], run.get("drafts"), run.get("settings")) == (engine, drafts, settings)
        ]
        shown.add_row(engine, drafts, settings, *_cells(own, _texts(runs, engine, settings), law.get(settings, {})))
    for run in runs:
        if "problem" in run:
            shown.add_row(run["engine"], run["problem"])
    console = Console(width=160)
    with console.capture() as capture:
        console.print(shown)
    return capture.get()


def _texts(runs: list[dict[str, Any]], engine: str, settings: str) -> dict[int, list[int]]:
    """The texts of the engine without drafts, by their seeds."""
    plain = ENGINES[engine].without_drafts
    found = [run for run in runs if run.get("kind") == "text" and (run["engine"], run["settings"]) == (plain, settings)]
    return {run["seed"]: run["text"] for run in found if run["drafts"] == "none"}


def _cells(own: list[dict[str, Any]], plain: dict[int, list[int]], law: dict[str, float]) -> list[str]:
    texts = [run for run in own if run["kind"] == "text"]
    rate = median(len(run["text"]) / run["seconds"] for run in texts)
    outside = [run["outside_ms"] for run in texts if run["outside_ms"] is not None]
    compared = [run["text"] == plain[run["seed"]] for run in texts if run["seed"] in plain]
    first = [run["token"] for run in own if run["kind"] == "first"]
    return [
        f"{rate:.1f}",
        f"{median(outside):.1f}" if outside else "not known",
        f"{sum(compared)} of {len(compared)}" if compared else "-",
        judged(first, law) if first and law else "-",
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
