"""What the commands do once models are loaded: generate, compare or plan, and print."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specens.analysis.compare import with_other_schedules, with_standard
from specens.analysis.measure import devices_of, measure, measure_weights
from specens.analysis.planner import Given, Measured, Prediction, candidates, pick, predict_all, unmeasured
from specens.analysis.speedup_plot import check_picture, picture_title, plot_speedups
from specens.cli import display
from specens.cli.exits import Output, errors, print_json
from specens.cli.progress import SILENT_SECONDS, progress
from specens.decoding.request import Ensemble, Event
from specens.drafters import PromptLookup, TreePlan
from specens.files.trace_file import traced
from specens.generate import Generation, SpeculativeEnsemble
from specens.settings.arguments import complete_ensemble

__all__ = [
    "PlanFor",
    "check_picture",
    "compare",
    "describe",
    "generate",
    "generate_shown",
    "plan",
    "plan_without_models",
    "print_result",
    "with_chat_of",
]


def describe(models: list[str], ensemble: SpeculativeEnsemble) -> dict[str, Any]:
    """What a trace says about the run."""
    lens = [length if isinstance(length, int) else str(length) for length in ensemble.plan.draft_lens]
    trees = {"tree": str(ensemble.plan.tree)} if ensemble.uses_trees else {}
    schedule, target = ensemble.schedule_name, str(ensemble.ensemble)
    return {"models": models, "schedule": schedule, "draft_lens": lens, "ensemble": target} | trees


def generate(
    models: list[str], ensemble: SpeculativeEnsemble, job: dict, trace: Path | None, stream: bool, json: bool
) -> bool:
    """Generate one text and print it; True if it was interrupted."""
    output = Output()
    with traced(trace, describe(models, ensemble)) as (on_round, on_text):
        generation = generate_shown(ensemble, job | {"on_round": on_round}, output, stream and not json)
        on_text(generation)
    if json:
        print_json({"models": models, "schedule": ensemble.schedule_name} | generation.to_dict())
    else:
        print_result(generation, output, stream)
    return generation.interrupted


def generate_shown(ensemble: SpeculativeEnsemble, job: dict, output: Output, stream: bool) -> Generation:
    """Generate one text, and show it as it comes, or else how long it is by now."""
    num_shown = 0

    def show(events: list[Event]) -> None:
        nonlocal num_shown
        display.print_events(output, events)
        num_shown += len(events)

    if stream:
        generation = ensemble.generate(**job, on_tokens=show)
        display.print_events(output, generation.events[num_shown:])  # where Ctrl-C came while they were printed
        return generation
    with progress(errors, "generating", first=SILENT_SECONDS) as shown:

        def count(events: list[Event]) -> None:
            nonlocal num_shown
            num_shown += len(events)
            shown.say(f"generating, {num_shown} tokens")

        return ensemble.generate(**job, on_tokens=count)


def print_result(generation: Generation, output: Output, streamed: bool) -> None:
    """End the line of a text that was shown as it came, or show it, and then the line about it."""
    output.print("" if streamed else generation.text, soft_wrap=True, highlight=False, markup=False)
    errors.print(display.summary(generation), style="dim", highlight=False, soft_wrap=True)


def compare(
    models: list[str],
    given: Sequence[SpeculativeEnsemble],
    job: dict,
    fixed_draft_len: int | None,
    tree: TreePlan | None,
    json: bool,
    rules: Sequence[str],
    schedules: Sequence[str] | None = None,
) -> bool:
    """Compare ensembles, the same by each engine, under every schedule, and print; True if it was interrupted.

    rules: none compares each as it is with `standard`. schedules: beside it, or None, as of `with_other_schedules`.
    """
    ensembles = [
        each
        for one in given
        for each in (
            with_other_schedules(one, fixed_draft_len, tree, rules, schedules) if rules else with_standard(one)
        )
    ]
    comparison = display.compare_with_progress(errors, ensembles, **with_chat_of(given[0], job))
    if json:
        print_json({"models": models} | comparison.to_dict())
    else:
        display.show_comparison(Output(), comparison)
    return comparison.interrupted


@dataclass(frozen=True)
class PlanFor:
    """What is planned for beside members: lengths up to `longest`, and a lookup, on the command line `drafter`.

    given: in place of what is measured.
    """

    longest: int
    lookup: PromptLookup | None
    drafter: str
    given: Given


def plan(
    models: list[str], ensemble: SpeculativeEnsemble, job: dict, wanted: PlanFor, plot: Path | None, json: bool
) -> None:
    """Measure, predict and print, and then draw the picture where a path for it is given."""
    job = with_chat_of(ensemble, job)
    outside = None if wanted.lookup is None else wanted.drafter
    apart = len(set(wanted.given.devices or devices_of(ensemble.models))) > 1
    chosen = list(candidates(ensemble.plan.num_members, wanted.longest, outside, apart=apart))
    with progress(errors, "measuring") as shown:
        measured = wanted.given.over(
            measure(ensemble, **job, candidates=chosen, lookup=wanted.lookup, on_step=shown.say)
        )
        shown.say("predicting")
        predictions = predict_all(measured, chosen)
    _print_plan(models, measured, predictions, json)
    if plot is not None:  # at the end, so that Ctrl-C only costs the picture
        with progress(errors, "measuring other weights") as shown:
            texts = {name: value for name, value in job.items() if name != "repeats"}
            by_weight = measure_weights(ensemble, measured, **texts, on_step=shown.say)
            shown.say("predicting other weights")
            title = picture_title(models, job["sampling"], ensemble)
            plot_speedups(plot, predictions, by_weight, _names(models), title)


def plan_without_models(
    ensemble: Ensemble | None, num_members: int, num_tokens: int, longest: int, given: Given, json: bool
) -> None:
    """Predict for members of which all is given, and print."""
    weights = getattr(complete_ensemble(ensemble, num_members), "weights", (1.0,))
    measured = given.over(unmeasured(tuple(map(float, weights)), num_tokens))
    predictions = predict_all(measured, list(candidates(num_members, longest, apart=measured.apart)))
    _print_plan([f"member {index}" for index in range(num_members)], measured, predictions, json)


def _print_plan(models: list[str], measured: Measured, predictions: Sequence[Prediction], json: bool) -> None:
    if json:
        found = {"measured": measured.to_dict(), "predictions": [one.to_dict() for one in predictions]}
        print_json({"models": models, "best": pick(predictions).candidate.options} | found)
    else:
        display.show_plan(Output(), measured, predictions, _names(models))


def _names(models: list[str]) -> list[str]:
    return [f"member {index}" for index in range(len(models))]


def with_chat_of(ensemble: SpeculativeEnsemble, job: dict[str, Any]) -> dict[str, Any]:
    """The job with the chat template in use, unless it says otherwise, where the tokenizer has one."""
    has_template = getattr(ensemble.tokenizer, "chat_template", None) is not None
    return job | {"chat": has_template if job["chat"] is None else job["chat"]}
