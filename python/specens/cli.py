"""The command `specens`: generate text from an ensemble, compare schedules, examine an installation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from specens import options
from specens.openmp import wait_briefly
from specens.options import clean_exit, errors, print_json

if TYPE_CHECKING:
    from specens.generate import SpeculativeEnsemble
    from specens.request import Event
    from specens.schedules.plan import TreePlan

app = typer.Typer(
    help="Text from speculative ensembles of language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

DEFAULT_QUESTION = "Explain what a decorator is in Python, with an example."

Schedule = Annotated[
    str | None,
    typer.Option(help="standard, fixed, alternate or tree. Default: alternate, or tree where --tree says so."),
]
Stream = Annotated[bool, typer.Option(help="Show tokens as they come, coloured by who proposed them.")]
Seed = Annotated[int | None, typer.Option(help="Default: a new one, shown with the result.")]
Question = Annotated[list[str] | None, typer.Option("--prompt", help="Once for all members, or once for each.")]
RunLength = Annotated[int, typer.Option(min=1, help="Every run writes exactly so many.")]
Repeats = Annotated[int, typer.Option(min=1, help="Interleaved runs of each schedule; medians are shown.")]
FixedDraftLen = Annotated[int | None, typer.Option(min=1, help="Of the schedule fixed. Default: as --draft-lens.")]


@app.command()
def generate(
    models: options.Models,
    weights: options.Weights = None,
    logit_weights: options.LogitWeights = None,
    contrast: options.Contrast = None,
    plausibility: options.Plausibility = None,
    schedule: Schedule = None,
    draft_lens: options.DraftLens = "1",
    tree: options.Tree = None,
    tree_nodes: options.TreeNodes = None,
    drafter: options.Drafter = 0,
    prompt: options.Prompt = None,
    chat: options.Chat = None,
    temperature: options.Temperature = 1.0,
    max_new_tokens: Annotated[int, typer.Option(min=0)] = 256,
    seed: Seed = None,
    dtype: options.Dtype = "bf16",
    device: options.Device = None,
    threads: options.Threads = None,
    stream: Stream = True,
    json: options.Json = False,
) -> None:
    """Generate text from the ensemble of MODELS, by speculation among them."""
    with clean_exit(json):
        job = _job(prompt, temperature, chat, seed=seed, max_new_tokens=max_new_tokens)
        mixture = options.parse_ensemble(weights, logit_weights, contrast, plausibility)
        placement = options.Placement(dtype, device, threads)
        plan = options.parse_tree(tree, tree_nodes)
        name = _schedule(schedule, plan is not None)
        ensemble = _load(models, placement, mixture, draft_lens, schedule=name, drafter=drafter, tree=plan)
        interrupted = _generate(models, ensemble, job, stream, json)
    if interrupted:
        raise typer.Exit(options.INTERRUPTED)


@app.command()
def compare(
    models: options.Models,
    weights: options.Weights = None,
    logit_weights: options.LogitWeights = None,
    contrast: options.Contrast = None,
    plausibility: options.Plausibility = None,
    draft_lens: options.DraftLens = "1",
    fixed_draft_len: FixedDraftLen = None,
    tree: options.Tree = None,
    tree_nodes: options.TreeNodes = None,
    drafter: options.Drafter = 0,
    prompt: Question = None,
    chat: options.Chat = None,
    temperature: options.Temperature = 1.0,
    max_new_tokens: RunLength = 128,
    seed: int = 0,
    dtype: options.Dtype = "bf16",
    device: options.Device = None,
    threads: options.Threads = None,
    repeats: Repeats = 3,
    json: options.Json = False,
) -> None:
    """Do the same job under standard, fixed, alternate and, with --tree, tree, and show what speculation gives.

    Without --prompt, the job is to answer a question about Python.
    """
    with clean_exit(json):
        question = prompt or [DEFAULT_QUESTION]
        job = _job(question, temperature, chat, seed=seed, max_new_tokens=max_new_tokens, repeats=repeats)
        mixture = options.parse_ensemble(weights, logit_weights, contrast, plausibility)
        placement = options.Placement(dtype, device, threads)
        plan = options.parse_tree(tree, tree_nodes)
        ensemble = _load(models, placement, mixture, draft_lens, schedule="standard", drafter=drafter)
        interrupted = _compare(models, ensemble, job, fixed_draft_len, plan, json)
    if interrupted:
        raise typer.Exit(options.INTERRUPTED)


@app.command()
def doctor(json: options.Json = False) -> None:
    """Show versions, backends and hardware, and why something is missing."""
    from specens.doctor import examine, report_dict, report_table

    facts = examine()
    if json:
        print_json(report_dict(facts))
    else:
        Console().print(report_table(facts))


def main() -> None:
    """The entry point of the command."""
    wait_briefly()
    app()


def _schedule(schedule: str | None, with_tree: bool) -> str:
    if with_tree and schedule not in (None, "tree"):
        raise ValueError(f"--schedule: expected tree beside --tree and --tree-nodes; got {schedule!r}")
    return schedule or ("tree" if with_tree else "alternate")


def _job(prompts: list[str] | None, temperature: float, chat: bool | None, **settings: Any) -> dict[str, Any]:
    """The arguments of one generation, checked before any model is loaded."""
    from specens_kernels import Sampling

    sampling = Sampling(temperature=temperature)
    return settings | {"prompt": options.read_prompt(prompts), "sampling": sampling, "chat": chat}


def _load(
    models: list[str], placement: options.Placement, mixture: Any, draft_lens: str, **settings: Any
) -> SpeculativeEnsemble:
    with errors.status(f"loading {', '.join(models)}"):
        from specens import SpeculativeEnsemble

        return SpeculativeEnsemble(
            models,
            ensemble=mixture,
            draft_lens=options.parse_draft_lens(draft_lens),
            **settings,
            **placement.apply(),
        )


def _generate(models: list[str], ensemble: SpeculativeEnsemble, job: dict, stream: bool, json: bool) -> bool:
    """Generate and print; True if it was interrupted."""
    from specens import display

    output = Console()

    def show(events: list[Event]) -> None:
        display.print_events(output, events)

    generation = ensemble.generate(
        **_with_chat_of(ensemble, job),
        on_tokens=show if stream and not json else None,
    )
    if json:
        print_json({"models": models, "schedule": ensemble.schedule_name} | generation.to_dict())
    else:
        output.print("" if stream else generation.text, soft_wrap=True, highlight=False, markup=False)
        errors.print(display.summary(generation), style="dim", highlight=False, soft_wrap=True)
    return generation.interrupted


def _compare(
    models: list[str],
    standard: SpeculativeEnsemble,
    job: dict,
    fixed_draft_len: int | None,
    tree: TreePlan | None,
    json: bool,
) -> bool:
    """Compare and print; True if it was interrupted."""
    from specens import display
    from specens.compare import with_other_schedules

    ensembles = with_other_schedules(standard, fixed_draft_len, tree)
    comparison = display.compare_with_progress(errors, ensembles, **_with_chat_of(standard, job))
    if json:
        print_json({"models": models} | comparison.to_dict())
    else:
        display.show_comparison(Console(), comparison)
    return comparison.interrupted


def _with_chat_of(ensemble: SpeculativeEnsemble, job: dict[str, Any]) -> dict[str, Any]:
    """The job with the chat template in use, unless it says otherwise, where the tokenizer has one."""
    has_template = getattr(ensemble.tokenizer, "chat_template", None) is not None
    return job | {"chat": has_template if job["chat"] is None else job["chat"]}


if __name__ == "__main__":
    main()
