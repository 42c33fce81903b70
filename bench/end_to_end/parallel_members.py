"""The parallel baselines of Fu et al. (WE-P, CD-P) beside the schedules: members in this process, and in two others.

python -m bench.end_to_end.parallel_members [--tokens 32] [--repeats 3]

`standard` with members that forward at the same time, each in a Ray actor with a thread, is the paper's WE-P (of a
mixture) and CD-P (contrastive); in this process, with a thread too, it is WE and CD. SmolLM2-135M-Instruct, the demo's
expert and a copy that lacks layers, in bf16. Beside each rate stands what `specens plan --devices` predicts: from
forwards timed in this process, acceptance on a text of `standard`, and latency and bandwidth of Ray's way here and
back. Rows are written as they are measured, and those that are there are not measured again. Needs the extra `ray`.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from specens import SpeculativeEnsemble
from specens.analysis.measure import measure
from specens.analysis.planner import Candidate, Given, Link, predict_all
from specens.engines.protocol import Engine, Needs, Read
from specens.engines.ray import RayEngine
from specens.engines.transformers.causal_lm import CausalLM
from specens.engines.transformers.load import load_model, load_tokenizer

from bench.end_to_end.ensembles import EXPERT, GENERAL, QUESTION, without_layers
from bench.end_to_end.rows import Row, append, missing, read
from bench.environment import environment
from specens_kernels import Contrastive, Mixture, Sampling

RESULTS = Path(__file__).parents[1] / "results/parallel-members-cpu.jsonl"
HERE, APART = "one process", "two actors"
MANY_ROWS = 32
AMATEUR = "without 12 to 19"


@dataclass(frozen=True)
class Case:
    """An ensemble, what the paper calls its baselines, and what it runs under."""

    members: tuple[str, str]
    ensemble: Mixture | Contrastive
    names: dict[str, str]
    candidates: tuple[Candidate, ...]


STANDARD = Candidate("standard", (1, 1))
CASES = {
    "mixture .5/.5": Case(
        (GENERAL, EXPERT),
        Mixture((0.5, 0.5)),
        {HERE: "WE", APART: "WE-P"},
        (STANDARD, Candidate("fixed", (3, 3), 0), Candidate("alternate", (1, 1)), Candidate("parallel", (1, 1), 0)),
    ),
    "contrastive .1": Case(
        (EXPERT, AMATEUR),
        Contrastive(0.1),
        {HERE: "CD", APART: "CD-P"},
        (STANDARD, Candidate("fixed", (2, 2), 1), Candidate("alternate", (1, 2)), Candidate("parallel", (2, 2), 1)),
    ),
}


def member(name: str) -> Engine:
    """A member, wherever this is called, on one thread."""
    torch.set_num_threads(1)
    model = load_model(GENERAL if name == AMATEUR else name, dtype=torch.bfloat16, device="cpu")
    return CausalLM(without_layers(model, set(range(12, 20))) if name == AMATEUR else model)


def main(
    tokens: Annotated[int, typer.Option(min=8, help="Tokens of each run.")] = 32,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each schedule, each with a seed of its own.")] = 3,
    case: Annotated[list[str] | None, typer.Option(help="Only these ensembles.")] = None,
    json_path: Annotated[Path, typer.Option("--json", help="Where rows are written as they are measured.")] = RESULTS,
    again: Annotated[bool, typer.Option("--again", help="Drop the rows that are there, and measure all.")] = False,
) -> None:
    """Run every schedule of every case in both places, and print a table of ratios to `standard` in one process."""
    if unknown := [name for name in case or () if name not in CASES]:
        raise typer.BadParameter(f"--case: expected {', '.join(CASES)}, got {', '.join(unknown)}")
    if again:
        json_path.unlink(missing_ok=True)
    names = case or list(CASES)
    for name in names:
        wanted = _wanted(name, tokens, repeats)
        if missing(wanted, read(json_path)):
            measure_case(name, wanted, tokens, json_path)
    wanted = [row for name in names for row in _wanted(name, tokens, repeats)]
    print_table([row for row in read(json_path) if any(one.items() <= row.items() for one in wanted)])


def _wanted(case: str, tokens: int, repeats: int) -> list[Row]:
    """The predictions first, and runs of all schedules in turn."""
    rows: list[Row] = [{"case": case, "kind": "predicted", "tokens": tokens}]
    for seed in range(repeats):
        for candidate in CASES[case].candidates:
            for where in (HERE, APART):
                if where == APART or candidate.schedule != "parallel":
                    own = {"where": where, "schedule": str(candidate), "seed": seed}
                    rows.append({"case": case, "kind": "run", "tokens": tokens} | own)
    return rows


def measure_case(name: str, wanted: list[Row], tokens: int, path: Path) -> None:
    """Measure the rows that are missing."""
    case, tokenizer = CASES[name], load_tokenizer(GENERAL)
    members = {
        HERE: [member(own) for own in case.members],
        APART: [RayEngine(partial(member, own)) for own in case.members],
    }
    job: dict[str, Any] = {"sampling": Sampling(), "chat": True, "max_new_tokens": tokens}
    for row in missing(wanted, read(path)):
        if row["kind"] == "predicted":
            append(path, row | _predicted(case, members, tokenizer, job) | {"environment": environment()})
            continue
        candidate = next(one for one in case.candidates if str(one) == row["schedule"])
        settings = {} if candidate.schedule == "standard" else {"drafter": candidate.drafter}
        ensemble = SpeculativeEnsemble(
            members[row["where"]], tokenizer, case.ensemble, candidate.draft_lens, candidate.schedule, **settings
        )
        text = ensemble.generate(QUESTION, seed=row["seed"], stop_tokens=(), generation_config="none", **job)
        found = {"tokens_per_second": text.statistics.tokens_per_second, "accepted": text.statistics.acceptance_rate}
        append(path, row | found | {"environment": environment()})


def _predicted(case: Case, members: dict[str, list[Engine]], tokenizer: Any, job: dict[str, Any]) -> Row:
    """Tokens a second of each schedule in both places, from what is measured in this process and of the link."""
    standard = SpeculativeEnsemble(members[HERE], tokenizer, case.ensemble, schedule="standard")
    measured = measure(standard, QUESTION, **job, samples=1, repeats=3, candidates=case.candidates)
    link = link_of(members[APART][0], measured.row_bytes)
    places = {HERE: Given(), APART: Given(devices=(1, 2), link=link)}
    rates = {
        where: {str(one.candidate): one.tokens_per_second for one in predict_all(given.over(measured), case.candidates)}
        for where, given in places.items()
    }
    costs = {str(indices[0]): cost.of(1) for indices, cost in measured.costs.items()}
    own = {"microseconds": 1e6 * link.seconds, "gbit_a_second": 8e-9 * link.bytes_per_second}
    return {"rates": rates, "forward_seconds": costs, "link": own, "row_bytes": measured.row_bytes}


def link_of(engine: Engine, row_bytes: float, repeats: int = 7) -> Link:
    """What a read by an actor takes beside its forward, with one row and with many: medians."""

    def beside(num_rows: int) -> float:
        times = []
        for _ in range(repeats):
            context = engine.open(Needs(1))
            text, tokens = context.add([1]), [1] * MANY_ROWS
            context.read([Read(text, tokens)])
            text.roll_back(0)
            started = time.perf_counter()
            context.read([Read(text, tokens, num_rows)])
            times.append(time.perf_counter() - started - sum(one.seconds for one in context.forwards))
        return statistics.median(times)

    one, many = beside(1), beside(MANY_ROWS)
    return Link(one, (MANY_ROWS - 1) * row_bytes / max(many - one, 1e-9))


def print_table(rows: list[Row]) -> None:
    """Rates, and measured and predicted ratios to `standard` in one process."""
    table = Table("ensemble", "members in", "schedule", "tokens/s", "over standard in one process", "predicted")
    predicted = {row["case"]: row["rates"] for row in rows if row["kind"] == "predicted"}
    found: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        if row["kind"] == "run":
            found.setdefault((row["case"], row["where"], row["schedule"]), []).append(row["tokens_per_second"])
    rates = {key: statistics.median(own) for key, own in found.items()}
    for (name, where, schedule), rate in sorted(rates.items(), key=lambda item: item[0][:2]):
        shown = f"{schedule} ({CASES[name].names[where]})" if schedule == "standard" else schedule
        gain = rate / rates[name, HERE, "standard"]
        foreseen = predicted[name][where][schedule] / predicted[name][HERE]["standard"]
        table.add_row(name, where, shown, f"{rate:.2f}", f"{gain:.2f}", f"{foreseen:.2f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    typer.run(main)
