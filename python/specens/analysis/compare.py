"""The same job under several schedules, measured side by side."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from specens.analysis.planner import WORTHWHILE
from specens.decoding.ideal import (
    alternate_speedup,
    fixed_speedup,
    fixed_speedup_without_bonus,
    outside_speedup,
    parallel_speedup,
)
from specens.decoding.statistics import Statistics
from specens.drafters import TreePlan
from specens.generate import SpeculativeEnsemble
from specens.settings.jobs import derived_seed
from specens_kernels import Sampling

WARM_UP_TOKENS = 8
WITH_TREES = {"fixed": "tree", "alternate": "alternate-tree"}  # what schedules are called where trees are drafted
EXPLAINED = 0.15  # a measured speed-up this far below the ideal one is explained


@dataclass
class Row:
    """What one schedule reached: rates and times are medians over its runs, counts are means, acceptance is pooled.

    engine: who runs the members, the names of several joined by " + ".
    speedup: tokens per second by those of the baseline. ideal_speedup: what the acceptance allows
        (`specens.decoding.ideal`), None for `alternate` with longer chains, for lengths that adapt, for drafters that
        are no members, and for `tree`, where a token has several chances. paper_speedup: the paper's ideal of `fixed`,
        which has no bonus tokens. tree: the trees that are drafted, None of chains.
    forwards: of each member. forward_ms: one forward of one member, prompts aside. other_share: of the whole time,
        outside forwards. prompt_share: of the whole time, in the forwards that read the prompts.
    """

    engine: str
    schedule: str
    rule: str
    draft_lens: list[int | str]
    tokens_per_second: float
    tokens_per_second_range: tuple[float, float]
    speedup: float
    ideal_speedup: float | None
    paper_speedup: float | None
    acceptance_rate: float | None
    forwards: list[float]
    model_calls: float
    forward_ms: float
    other_share: float
    prompt_share: float
    tree: str | None
    runs: list[dict]


@dataclass
class Comparison:
    """The rows of a comparison, what they say in sentences, and whether Ctrl-C ended it early."""

    rows: list[Row]
    findings: list[str]
    max_new_tokens: int
    repeats: int
    interrupted: bool

    def to_dict(self) -> dict:
        """Everything as plain values for JSON."""
        return asdict(self)


def compare(
    ensembles: Sequence[SpeculativeEnsemble],
    prompt: Any,
    *,
    max_new_tokens: int = 128,
    sampling: Sampling | None = None,
    seed: int = 0,
    chat: bool = False,
    repeats: int = 3,
    on_run: Callable[[str, int], None] | None = None,
) -> Comparison:
    """Run the same job with every ensemble, which differ in schedules and engines only; the first is the baseline.

    Runs are interleaved and repeated, after a short warm-up; run r of each ensemble has the same seed, derived from
    `seed` and r. No end of sequence stops them, so that all write `max_new_tokens`, and the generation configs of the
    members are left out. on_run: called before a run with its schedule and its number, 0 being the warm-up. Ctrl-C ends
    the comparison with the runs that are complete.
    """
    runs: list[list[Statistics]] = [[] for _ in ensembles]
    interrupted = False
    jobs = [(repeat, index) for repeat in range(repeats + 1) for index in range(len(ensembles))]
    try:
        for repeat, index in jobs:
            ensemble, is_warm_up = ensembles[index], repeat == 0
            if on_run is not None:
                on_run(_name(ensemble), repeat)
            generation = ensemble.generate(
                prompt,
                max_new_tokens=min(WARM_UP_TOKENS, max_new_tokens) if is_warm_up else max_new_tokens,
                sampling=sampling,
                seed=derived_seed(seed, 0, repeat),
                chat=chat,
                stop_tokens=(),
                generation_config="none",
            )
            interrupted = generation.interrupted
            if interrupted:
                break
            if not is_warm_up:
                runs[index].append(generation.statistics)
    except KeyboardInterrupt:  # between the runs
        interrupted = True
    complete = [index for index in range(len(ensembles)) if runs[index]]
    rows = [_row(ensembles[index], runs[index], runs[0]) for index in complete]
    return Comparison(rows, _findings(rows), max_new_tokens, repeats, interrupted)


def with_standard(ensemble: SpeculativeEnsemble) -> list[SpeculativeEnsemble]:
    """The same target under `standard`, and the ensemble as it is. Raises ValueError where it does not speculate."""
    if not ensemble.schedule.speculates:
        raise ValueError("schedule: expected one that speculates, to compare with standard; got standard")
    what = (ensemble.models, ensemble.tokenizer, ensemble.ensemble)
    return [SpeculativeEnsemble(*what, schedule="standard"), ensemble]


def with_other_schedules(
    ensemble: SpeculativeEnsemble,
    fixed_draft_len: int | None = None,
    tree: TreePlan | Sequence[int] | None = None,
    rules: Sequence[str] = ("token",),
    schedules: Sequence[str] | None = None,
) -> list[SpeculativeEnsemble]:
    """An ensemble under `standard`, and with its drafter and lengths under those that suit its number of members.

    fixed_draft_len: of the drafter under `fixed` and `parallel`, where it should differ. tree: the trees of `tree` and
    `alternate-tree`, which are left out without. rules: "token", "gumbel" or both, each of which accepts drafts in
    every schedule. schedules: those beside `standard`; None is `fixed`, `alternate` (not with a drafter that is no
    member), and the same with trees, `tree` and `alternate-tree`, where there is one.
    Raises ValueError for a lone member without such a drafter, for schedules that there are not, for a length or trees
    of schedules that are not among them, and for trees where a member's cache cannot hold them.
    """
    plan, members = ensemble.plan, ensemble.models
    is_member = isinstance(plan.drafter, int)
    if plan.num_members < 2 and is_member:
        raise ValueError("models: expected two members or more to compare schedules, got 1")
    fixed_lens = plan.draft_lens if fixed_draft_len is None else (fixed_draft_len,) * plan.num_members
    if schedules is None:
        schedules = ["fixed", *["alternate"] * is_member]
        schedules += [WITH_TREES[name] for name in schedules if tree is not None]
    known = ["fixed", "alternate", "parallel", *WITH_TREES.values()]
    if unknown := [name for name in schedules if name not in known]:
        raise ValueError(f"schedules: expected some of {', '.join(known)}; got {unknown[0]!r}")
    if tree is not None and not set(WITH_TREES.values()) & set(schedules):
        raise ValueError(f"tree: expected none without the schedules tree and alternate-tree, got {tree}")
    if fixed_draft_len is not None and not {"fixed", "parallel"} & set(schedules):
        raise ValueError(f"fixed_draft_len: expected none without fixed and parallel, got {fixed_draft_len}")
    of_plan = {"fixed": fixed_lens, "alternate": plan.draft_lens, "parallel": fixed_lens}
    lens: dict[str, Any] = {name: of_plan.get(name) for name in schedules}
    if not is_member:  # it takes one length
        lens = {name: own and own[0] for name, own in lens.items()}
    what = (members, ensemble.tokenizer, ensemble.ensemble)
    standard = SpeculativeEnsemble(*what, schedule="standard", rule=rules[0])
    others = []
    for name in lens:
        alternates = name in ("alternate", WITH_TREES["alternate"])
        how: dict[str, Any] = {
            "schedule": "alternate" if alternates else name,
            "drafter": plan.proposes_first if alternates else plan.drafter,
            "tree": (tree or TreePlan()) if name in WITH_TREES.values() else None,
        }
        others += [SpeculativeEnsemble(*what, lens[name], **how, rule=rule) for rule in rules]
    return [standard, *others]


def _row(ensemble: SpeculativeEnsemble, runs: list[Statistics], baseline: list[Statistics]) -> Row:
    name, plan = _name(ensemble), ensemble.plan
    rates = [run.tokens_per_second for run in runs]
    tested = sum(sum(run.tested) for run in runs)
    acceptance = sum(sum(run.accepted) for run in runs) / tested if tested else None
    ideal, paper = _ideals(ensemble, acceptance, runs, baseline)
    return Row(
        engine=" + ".join(dict.fromkeys(model.name for model in ensemble.models)),
        schedule=name,
        rule=str(plan.rule),
        draft_lens=[length if isinstance(length, int) else str(length) for length in plan.draft_lens],
        tokens_per_second=statistics.median(rates),
        tokens_per_second_range=(min(rates), max(rates)),
        speedup=statistics.median(rates) / statistics.median(run.tokens_per_second for run in baseline),
        ideal_speedup=ideal,
        paper_speedup=paper,
        acceptance_rate=acceptance,
        forwards=[statistics.mean(counts) for counts in zip(*(run.forwards for run in runs), strict=True)],
        model_calls=statistics.mean(run.model_calls for run in runs),
        forward_ms=1000 * statistics.median(run.seconds_per_forward for run in runs),
        other_share=statistics.median(run.overhead_seconds / run.seconds for run in runs),
        prompt_share=statistics.median(run.prompt_seconds / run.seconds for run in runs),
        tree=str(plan.tree) if ensemble.uses_trees else None,
        runs=[run.to_dict() for run in runs],
    )


def _name(ensemble: SpeculativeEnsemble) -> str:
    """Of its schedule: `fixed` with trees is `tree`, `alternate` with them `alternate-tree`."""
    return WITH_TREES[ensemble.schedule_name] if ensemble.uses_trees else ensemble.schedule_name


def _ideals(
    ensemble: SpeculativeEnsemble, acceptance: float | None, runs: list[Statistics], baseline: list[Statistics]
) -> tuple[float | None, float | None]:
    """The ideal speed-up of the schedule as it runs, and that of the paper where it is another."""
    name, plan = _name(ensemble), ensemble.plan
    if name == "standard":
        return 1.0, None
    if acceptance is None or ensemble.uses_trees:
        return None, None
    everyone = range(plan.num_members)
    costs = [sum(run.forward_seconds[index] for run in baseline) for index in everyone]
    if name == "parallel":
        apart, index = all(model.runs_elsewhere for model in ensemble.models), plan.drafter
        if not apart or not isinstance(index, int) or not plan.drafter_counts:
            return None, None
        length, others = plan.draft_lens[index], max(costs[other] for other in everyone if other != index)
        return (parallel_speedup(length, acceptance, costs[index] / others) if isinstance(length, int) else None), None
    if name == "alternate":
        return (alternate_speedup(acceptance, plan.num_members) if set(plan.draft_lens) == {1} else None), None
    draft_len = plan.draft_lens[plan.drafter] if isinstance(plan.drafter, int) else None
    if not isinstance(plan.drafter, int) or not isinstance(draft_len, int):
        return None, None
    if not plan.drafter_counts:  # then the baseline does without it
        forwards = sum(run.forwards[plan.drafter] for run in runs)
        own = sum(run.forward_seconds[plan.drafter] for run in runs) / forwards
        return outside_speedup(draft_len, acceptance, own * sum(run.emitted for run in baseline) / sum(costs)), None
    cost = costs[plan.drafter] / (sum(costs) - costs[plan.drafter])
    return fixed_speedup(draft_len, acceptance, cost), fixed_speedup_without_bonus(draft_len, acceptance, cost)


def _findings(rows: list[Row]) -> list[str]:
    """What a reader should take from the numbers, in sentences; the first says whether speculation pays."""
    if len(rows) < 2:
        return []
    if len({row.engine for row in rows}) > 1:
        engines = [[row for row in rows if row.engine == name] for name in dict.fromkeys(row.engine for row in rows)]
        found = [f"{own[0].engine}: {finding}" for own in engines for finding in _findings(own)]
        return found + [_between(engines[0], own) for own in engines[1:]]
    standard, *others = rows
    several = len({row.rule for row in rows}) > 1

    def name(row: Row) -> str:
        return f"{row.schedule} by rule {row.rule}" if several else row.schedule

    best = max(others, key=lambda row: row.tokens_per_second)
    speedup = best.tokens_per_second / standard.tokens_per_second
    if speedup >= WORTHWHILE:
        found = [f"{name(best)} writes {speedup:.2f} times as many tokens a second as {standard.schedule}."]
    else:
        speed = f"runs at {speedup:.2f} times the speed of {standard.schedule}"
        found = [f"Speculation does not pay here: the best of it, {name(best)}, {speed}."]
    if standard.model_calls < sum(standard.forwards):
        found.append(f"Members share weights, so {standard.schedule} forwards them as one batch: hard to beat.")
    slow = [row for row in others if _share_of_ideal(row, standard) < 1 - EXPLAINED]
    found += [_explanation(name(row), row, standard) for row in slow]
    return found + [
        f"Without bonus tokens, as in the paper, the ideal of {name(row)} would be {row.paper_speedup:.2f}."
        for row in others
        if row.paper_speedup is not None
    ]


def _between(first: Sequence[Row], second: Sequence[Row]) -> str:
    one, other = (max(rows, key=lambda row: row.tokens_per_second) for rows in (first, second))
    times, plain = other.tokens_per_second / one.tokens_per_second, second[0].tokens_per_second
    return (
        f"{other.engine} writes {times:.2f} times as many tokens a second as {one.engine}, each at its best, and "
        f"{plain / first[0].tokens_per_second:.2f} times under {first[0].schedule}."
    )


def _share_of_ideal(row: Row, standard: Row) -> float:
    speedup = row.tokens_per_second / standard.tokens_per_second
    return 1.0 if row.ideal_speedup is None else speedup / row.ideal_speedup


def _explanation(name: str, row: Row, standard: Row) -> str:
    return (
        f"{name} reaches {_share_of_ideal(row, standard):.0%} of its ideal: "
        f"one of its forwards, which read several tokens, takes {row.forward_ms:.1f} ms "
        f"({standard.schedule}: {standard.forward_ms:.1f} ms); {row.other_share:.1%} of its time is outside forwards "
        f"({standard.schedule}: {standard.other_share:.1%})."
    )
