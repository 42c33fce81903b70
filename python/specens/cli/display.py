"""How generations and comparisons look on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specens.analysis.compare import Comparison, Row, compare
from specens.analysis.planner import Measured, Prediction, pick
from specens.cli.progress import progress
from specens.decoding.request import Event
from specens.generate import Generation, SpeculativeEnsemble
from specens.presets import Preset

SHOWN_COUNTS = (1, 2, 3, 4, 6, 8)
SHOWN_OF_A_KIND = 4
PROPOSER_STYLES = ("cyan", "magenta", "green", "blue")
RECOVERED_STYLE = "bold yellow"
BONUS_STYLE = "underline"


def event_style(event: Event) -> str:
    """The style of a token's text: whose draft it was, or how it was drawn instead."""
    if event.proposer is not None:
        return PROPOSER_STYLES[event.proposer % len(PROPOSER_STYLES)]
    return {"recovered": RECOVERED_STYLE, "bonus": BONUS_STYLE}.get(event.kind, "")


def legend(names: Sequence[str], schedule: str) -> Text:
    """What the styles of a streamed text mean."""
    if schedule == "standard":
        return Text("every token drawn from the ensemble")
    parts = [(f"drafted by {name}", PROPOSER_STYLES[i % len(PROPOSER_STYLES)]) for i, name in enumerate(names)]
    parts.append(("recovered after a rejection", RECOVERED_STYLE))
    if schedule in ("fixed", "tree"):
        parts.append(("bonus", BONUS_STYLE))
    separated = [piece for part in parts for piece in (part, "  ")]
    return Text.assemble(*separated[:-1])


def print_events(console: Console, events: Sequence[Event]) -> None:
    """Append the text of new tokens to the line that is being written."""
    text = Text.assemble(*((event.text, event_style(event)) for event in events))
    console.print(text, end="", soft_wrap=True, highlight=False)


def summary(generation: Generation) -> str:
    """One line about a generation."""
    statistics = generation.statistics
    parts = [f"{statistics.emitted} tokens in {statistics.seconds:.1f} s ({statistics.tokens_per_second:.1f} tokens/s)"]
    parts.append("forwards " + " + ".join(str(count) for count in statistics.forwards))
    if statistics.acceptance_rate is not None:
        parts.append(f"acceptance {statistics.acceptance_rate:.2f}")
    parts.append(f"seed {generation.seed}")
    if statistics.status:
        parts.append("status " + " ".join(statistics.to_dict()["status"]))
    return ", ".join(parts)


def compare_with_progress(console: Console, ensembles: Sequence[SpeculativeEnsemble], **job: Any) -> Comparison:
    """`specens.analysis.compare.compare`, showing how far it is. job: its arguments; `repeats` must be among them."""
    with progress(console, "comparing", len(ensembles) * (job["repeats"] + 1), done=-1) as shown:

        def announce(schedule: str, repeat: int) -> None:
            run = f"run {repeat} of {job['repeats']}" if repeat else "warming up"
            shown.say(f"{schedule}, {run}", advance=1)

        return compare(ensembles, on_run=announce, **job)


def show_comparison(console: Console, comparison: Comparison) -> None:
    """Print the table and what it says."""
    console.print(comparison_table(comparison))
    for finding in comparison.findings:
        console.print(finding, highlight=False)
    if comparison.interrupted:
        console.print("Interrupted: only complete runs are shown.", style="yellow")


def comparison_table(comparison: Comparison) -> Table:
    """One line for each schedule. other: the share of the time outside the members' forwards."""
    caption = f"{comparison.max_new_tokens} tokens a run, medians of {comparison.repeats} interleaved runs"
    names = ("schedule", "tokens/s", "speed-up", "ideal", "accepted", "forwards", "ms/forward", "other")
    table = _table(caption, names)
    with_rules = len({row.rule for row in comparison.rows}) > 1
    with_engines = len({row.engine for row in comparison.rows}) > 1
    for row in comparison.rows:
        schedule, *cells = _cells(row, with_rules)
        table.add_row(f"{row.engine}: {schedule}" if with_engines else schedule, *cells)
    return table


def _cells(row: Row, with_rule: bool) -> list[str]:
    lens = row.draft_lens[:1] if len(set(row.draft_lens)) == 1 else row.draft_lens
    drafts = row.tree or ",".join(map(str, lens))
    drafts += f" {row.rule}" if with_rule else ""
    return [
        row.schedule if row.acceptance_rate is None else f"{row.schedule} {drafts}",
        f"{row.tokens_per_second:.1f}",
        f"{row.speedup:.2f}",
        _optional(row.ideal_speedup),
        _optional(row.acceptance_rate),
        " + ".join(f"{count:.0f}" for count in row.forwards),
        f"{row.forward_ms:.1f}",
        f"{row.other_share:.1%}",
    ]


def show_plan(console: Console, measured: Measured, predictions: Sequence[Prediction], names: Sequence[str]) -> None:
    """Print what was measured, what is predicted, the fastest first, and what to do."""
    console.print(cost_table(measured, names))
    console.print(prediction_table(predictions))
    best = pick(predictions)
    gain = f"{best.tokens_per_second:.1f} tokens/s, {best.speedup:.2f} times standard"
    console.print(f"Best: {best.candidate.options} ({gain})", highlight=False, soft_wrap=True)
    others = [one for one in predictions if one.candidate.schedule != "standard"]
    if best.candidate.schedule == "standard" and others:
        speed = f"{others[0].candidate}, would run at {others[0].speedup:.2f} times the speed of standard"
        console.print(f"Speculation does not pay here: the best of it, {speed}.", highlight=False, soft_wrap=True)


def cost_table(measured: Measured, names: Sequence[str]) -> Table:
    """What a forward costs by its number of tokens, and how often a member's drafts are accepted."""
    table = _table("ms of a forward by its number of tokens", ("member", *map(str, SHOWN_COUNTS), "accepted"))
    acceptance = measured.mean_acceptance()
    for indices, cost in measured.costs.items():
        who = " and ".join(names[index] for index in indices)
        accepted = _optional(acceptance[indices[0]]) if len(indices) == 1 < measured.num_members else ""
        table.add_row(who, *(f"{1000 * cost.of(count):.1f}" for count in SHOWN_COUNTS), accepted)
    return table


def prediction_table(predictions: Sequence[Prediction]) -> Table:
    """The fastest of each schedule and drafter, and `standard`. at least: what the weights promise for any text."""
    names = ("schedule", "tokens/s", "speed-up", "at least", "accepted", "forwards a token")
    table = _table("predicted, the best of each kind", names)
    shown: dict[tuple[str, int | str | None], int] = {}
    for prediction in predictions:
        kind = (prediction.candidate.schedule, prediction.candidate.drafter)
        shown[kind] = shown.get(kind, 0) + 1
        if shown[kind] <= SHOWN_OF_A_KIND:
            table.add_row(
                str(prediction.candidate),
                f"{prediction.tokens_per_second:.1f}",
                f"{prediction.speedup:.2f}",
                _optional(prediction.least_speedup),
                _optional(prediction.acceptance),
                " + ".join(f"{count:.2f}" for count in prediction.forwards),
            )
    return table


def _table(caption: str, names: Sequence[str]) -> Table:
    """A table of numbers for 80 columns. What is too wide all the same takes more lines; nothing is cut."""
    table = Table(caption=caption, caption_justify="left", box=SIMPLE_HEAD, show_edge=False, padding=0)
    table.add_column(names[0], overflow="fold")
    for name in names[1:]:
        table.add_column(name, justify="right", no_wrap="forwards" not in name, overflow="fold")
    return table


def _optional(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def methods_table(methods: Mapping[str, Preset]) -> Table:
    """Each published method: its name, whole at any width, what it chooses, its source, what it leaves out of that."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, show_lines=False, padding=(0, 1, 0, 0))
    table.add_column("method", no_wrap=True)
    table.add_column("members: drafter | topology | target | acceptance | schedule")
    for name, method in methods.items():
        axes = (method.drafter, method.topology, method.target, method.acceptance, method.schedule)
        choices = f"{', '.join(method.members)}: {' | '.join(axes)}\n"
        rest = f"\nleaves out: {method.leaves_out}" if method.leaves_out else ""
        table.add_row(name, Text.assemble(choices, (method.source + rest, "dim")))
    return table
