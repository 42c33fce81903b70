"""The command `specens`: generate text from an ensemble, chat, compare schedules, examine an installation."""

from __future__ import annotations

import io
import sys
import warnings
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from specens.cli import INTERRUPTED, options
from specens.cli.chat import chat
from specens.cli.config import OF_THIS_CALL, Config, SaveConfig
from specens.cli.exits import Command, Output, errors, print_json
from specens.cli.models import load, load_in_workers
from specens.cli.openmp import wait_briefly
from specens.cli.progress import SILENT_SECONDS, progress
from specens.files.json_lines import STANDARD, check_index, is_stream

app = typer.Typer(
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its boxes leave 20 columns of 80 for the words, and cut longer ones
)

# The prompts of a file are checked for themselves, and so is the seed.
WITHOUT_EFFECT_ON_TEXTS = {
    "input",
    "output",
    "trace",
    "batch_size",
    "device",
    "threads",
    "ray_address",
    "ray_options",
    "workers",
    "stream",
    "json",
    "seed",
} | OF_THIS_CALL
GRAMMARS = {"json_schema", "regex", "lark"}  # what their files say has an effect, and not the files' names
PLOT_HELP = "Draw speed-up against draft length, and for a mixture of two against the weight: NAME.png, .svg, .pdf, ..."
PLANNED_HELP = "lookup[:LONGEST]: plan for prompt lookup, and not for members only. Of a lone model the default."
WITHOUT_MODELS = {"weights", "logit_weights", "contrast", "longest", "max_new_tokens", "json"} | {
    "devices",
    "link",
    "forward_ms",
    "acceptance",
    "row_bytes",
}
DEVICES_HELP = (
    "On which device or machine each member is: 0,1. Forwards of those on different ones go on at the same time; on 0, "
    "texts are verified. Default: as they are here, ray: members on one each."
)
LINK_HELP = "From device 0 to each other one: GBIT_A_SECOND:MICROSECONDS, there and back: 100:20. Default: free."
FORWARD_HELP = "Milliseconds of a forward of each member, and of each token more: 24:.1,6:.05. Default: measured here."
ACCEPTANCE_HELP = "How often drafts of each member are accepted: .9,.7. Default: measured here."
ROW_BYTES_HELP = "Of one row of a member's logits, as it passes the link. Default: measured here."
DEFAULT_QUESTION = "Explain what a decorator is in Python, with an example."

Question = Annotated[list[str] | None, typer.Option("--prompt", help="Once for all members, or once for each.")]
RunLength = Annotated[int, typer.Option(min=1, help="Every run writes exactly so many.")]
Repeats = Annotated[int, typer.Option(min=1, help="Interleaved runs of each schedule; medians are shown.")]
Longest = Annotated[int, typer.Option(min=1, help="Draft lengths are tried up to this one.")]
PlannedModels = Annotated[
    list[str] | None, typer.Argument(help="As of generate; none where --forward-ms and --acceptance stand for them.")
]
Planned = Annotated[str | None, typer.Option("--drafter", help=PLANNED_HELP)]
Traced = Annotated[
    Path,
    typer.Argument(help="A file that generate --trace wrote. Standard input: -"),
]
FixedDraftLen = Annotated[int | None, typer.Option(min=1, help="Of fixed and parallel. Default: as --draft-lens.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        Output().print(f"specens {metadata.version('specens-kernels')}", highlight=False)
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_show_version)
]


@app.callback()
def about(version: Version = False) -> None:
    """Text from speculative ensembles of language models."""


@app.command(cls=Command, short_help="Generate text from an ensemble of models.")
def generate(
    context: typer.Context,
    models: options.Models,
    config: Config = None,
    save_config: SaveConfig = None,
    preset: options.Preset = None,
    weights: options.Weights = None,
    logit_weights: options.LogitWeights = None,
    contrast: options.Contrast = None,
    plausibility: options.Plausibility = None,
    schedule: options.Schedule = None,
    draft_lens: options.DraftLens = None,
    tree: options.Tree = None,
    tree_nodes: options.TreeNodes = None,
    drafter: options.Drafter = None,
    rule: options.Rule = None,
    prompt: options.Prompt = None,
    chat: options.Chat = None,
    temperature: options.ModelTemperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    max_new_tokens: options.MaxNewTokens = None,
    min_new_tokens: options.MinNewTokens = None,
    repetition_penalty: options.RepetitionPenalty = None,
    no_repeat_ngram_size: options.NoRepeatNgramSize = None,
    stop: options.Stop = None,
    json_schema: options.JsonSchema = None,
    regex: options.Regex = None,
    lark: options.LarkGrammar = None,
    generation_config: options.GenerationConfig = "model",
    seed: options.Seed = None,
    input: options.Input = None,
    output: options.Output = None,
    batch_size: options.BatchSize = 8,
    samples: options.Samples = 1,
    exact: options.Exact = False,
    trace: options.Trace = None,
    workers: options.Workers = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    threads: options.Threads = None,
    model_kwargs: options.ModelKwargs = None,
    ray_address: options.RayAddress = None,
    ray_options: options.RayOptions = None,
    stream: options.Stream = True,
    json: options.Json = False,
) -> None:
    """Generate text from the ensemble of MODELS, by speculation among them.

    With --input, --output or --samples, texts are JSON lines, each on the disk as soon as it is finished.
    """
    from specens.cli import commands
    from specens.cli.file_run import FileRun, Files

    files = Files(input, output, trace, batch_size, samples, exact)
    files.check()
    if json and files.are_many:
        raise ValueError("--json: expected none beside --input, --output and --samples, which give JSON lines")
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    given = options.as_settings(
        sampling,
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        stop_strings=stop,
        generation_config=options.parse_generation_config(
            generation_config, repetition_penalty=repetition_penalty, no_repeat_ngram_size=no_repeat_ngram_size
        ),
        grammar=options.parse_grammar(json_schema, regex, lark),
    )
    job = _job(prompt, chat, input, seed=seed, **given)
    mixture = options.parse_ensemble(len(models), weights, logit_weights, contrast, plausibility)
    trees = options.parse_tree(tree, tree_nodes, schedule)
    texts_of = _settings_of_texts(context, models) | ({"grammar": str(given["grammar"])} if "grammar" in given else {})
    placement = options.Placement.of(context)
    how: dict[str, Any] = {"schedule": schedule, "drafter": drafter, "tree": trees, "rule": rule, "preset": preset}
    how |= {"ensemble": mixture, "draft_lens": draft_lens}
    if files.are_many:
        from specens.files.workers import ask

        run = FileRun(files, job, texts_of, partial(_as_given, context))
        many = (
            load_in_workers(context, models, placement, workers, **how)
            if workers
            else load(context, models, placement, **how)
        )
        job = ask(many, partial(commands.with_chat_of, job=job))
        run.generate(many, job["chat"], ask(many, partial(commands.describe, models)), errors)
        return
    if workers is not None:
        raise ValueError("--workers: expected --input, --output or --samples beside it, which write many texts")
    ensemble = load(context, models, placement, **how)
    job = commands.with_chat_of(ensemble, job)
    interrupted = commands.generate(models, ensemble, job, trace, stream, json)
    if interrupted:
        raise typer.Exit(INTERRUPTED)


app.command(cls=Command, short_help="Talk with an ensemble of models.")(chat)


@app.command(cls=Command, short_help="Measure the same job under every schedule.")
def compare(
    context: typer.Context,
    models: options.Models,
    config: Config = None,
    save_config: SaveConfig = None,
    preset: options.Preset = None,
    weights: options.Weights = None,
    logit_weights: options.LogitWeights = None,
    contrast: options.Contrast = None,
    plausibility: options.Plausibility = None,
    draft_lens: options.DraftLens = None,
    fixed_draft_len: FixedDraftLen = None,
    tree: options.Tree = None,
    tree_nodes: options.TreeNodes = None,
    drafter: options.Drafter = None,
    rule: options.Rules = None,
    schedules: options.Schedules = None,
    engine: options.ComparedEngines = None,
    prompt: Question = None,
    chat: options.Chat = None,
    temperature: options.Temperature = 1.0,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    max_new_tokens: RunLength = 128,
    seed: int = 0,
    dtype: options.Dtype = None,
    device: options.Device = None,
    threads: options.Threads = None,
    model_kwargs: options.ModelKwargs = None,
    ray_address: options.RayAddress = None,
    ray_options: options.RayOptions = None,
    repeats: Repeats = 3,
    json: options.Json = False,
) -> None:
    """Do the same job under standard, fixed, alternate and, with --tree, tree, or those that --schedules names.

    With --engine, by one engine after the other: transformers,llama_cpp shows both for GGUF files. With --preset, under
    standard and as the method says.

    Without --prompt, the job is to answer a question about Python.
    """
    from specens.cli import commands

    sampling = options.as_sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    lengths: dict[str, Any] = {"max_new_tokens": max_new_tokens, "repeats": repeats}
    job = _job(prompt or [DEFAULT_QUESTION], chat, seed=seed, sampling=sampling, **lengths)
    mixture = options.parse_ensemble(len(models), weights, logit_weights, contrast, plausibility)
    placement = options.Placement.of(context)
    trees = options.parse_tree(tree, tree_nodes)
    how: dict[str, Any] = {"ensemble": mixture, "draft_lens": draft_lens, "drafter": drafter, "preset": preset}
    rules = options.parse_compared_rules(rule) if preset is None else []
    if preset is not None:
        if fixed_draft_len is not None:
            raise ValueError(
                f"--fixed-draft-len: expected --draft-lens beside --preset {preset}, got {fixed_draft_len}"
            )
        if schedules is not None:
            raise ValueError(f"--schedules: expected none beside --preset {preset}, which has its own; got {schedules}")
        how |= {"tree": trees, "rule": rule}
    ensembles = [load(context, named, placement, **how) for named in options.by_engines(models, engine)]
    named = None if schedules is None else schedules.split(",")
    interrupted = commands.compare(models, ensembles, job, fixed_draft_len, trees, json, rules, named)
    if interrupted:
        raise typer.Exit(INTERRUPTED)


@app.command(cls=Command, short_help="Predict which schedule is the fastest.")
def plan(
    context: typer.Context,
    models: PlannedModels = None,
    config: Config = None,
    save_config: SaveConfig = None,
    weights: options.Weights = None,
    logit_weights: options.LogitWeights = None,
    contrast: options.Contrast = None,
    plausibility: options.Plausibility = None,
    longest: Longest = 8,
    drafter: Planned = None,
    devices: Annotated[str | None, typer.Option(help=DEVICES_HELP)] = None,
    link: Annotated[str | None, typer.Option(help=LINK_HELP)] = None,
    forward_ms: Annotated[str | None, typer.Option(help=FORWARD_HELP)] = None,
    acceptance: Annotated[str | None, typer.Option(help=ACCEPTANCE_HELP)] = None,
    row_bytes: Annotated[int | None, typer.Option(min=1, help=ROW_BYTES_HELP)] = None,
    prompt: Question = None,
    chat: options.Chat = None,
    temperature: options.Temperature = 1.0,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    max_new_tokens: RunLength = 128,
    samples: Annotated[int, typer.Option(min=1, help="Texts that acceptance is measured on.")] = 2,
    seed: int = 0,
    dtype: options.Dtype = None,
    device: options.Device = None,
    threads: options.Threads = None,
    model_kwargs: options.ModelKwargs = None,
    ray_address: options.RayAddress = None,
    ray_options: options.RayOptions = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timings of each forward; medians are taken.")] = 5,
    plot: Annotated[Path | None, typer.Option(help=PLOT_HELP)] = None,
    json: options.Json = False,
) -> None:
    """Predict the speed of every schedule and draft length from measured costs and acceptance, and pick the best.

    With --devices for members on several devices or machines. Without MODELS, from costs and acceptance that are given.

    Without --prompt, the texts answer a question about Python.
    """
    from specens.cli import commands

    num_members = len(models) if models else len((forward_ms or acceptance or "").split(","))
    given = options.parse_given(num_members, forward_ms, acceptance, devices, link, row_bytes)
    if not models:
        check_planned_without_models(context, given)
        mixture = options.parse_ensemble(num_members, weights, logit_weights, contrast, plausibility)
        commands.plan_without_models(mixture, num_members, max_new_tokens, longest, given, json)
        return
    sampling = options.as_sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    lengths: dict[str, Any] = {"max_new_tokens": max_new_tokens, "samples": samples, "repeats": repeats}
    job = _job(prompt or [DEFAULT_QUESTION], chat, seed=seed, sampling=sampling, **lengths)
    mixture = options.parse_ensemble(len(models), weights, logit_weights, contrast, plausibility)
    placement = options.Placement.of(context)
    lookup = options.parse_planned(drafter, len(models))
    if plot is not None:
        commands.check_picture(plot)
    ensemble = load(context, models, placement, ensemble=mixture, schedule="standard")
    if link is not None and any(model.runs_elsewhere for model in ensemble.models):
        raise ValueError("--link: expected none beside ray: members, whose costs are measured through theirs")
    commands.plan(models, ensemble, job, commands.PlanFor(longest, lookup, drafter or "lookup", given), plot, json)


@app.command(cls=Command, short_help="Make an HTML page of a trace.")
def show(
    trace: Traced,
    output: Annotated[Path | None, typer.Option(help="Default: TRACE.html. Standard output: -")] = None,
) -> None:
    """Make one HTML page of TRACE: who proposed each token, what was accepted, and where the time went."""
    from specens.analysis.trace_page import render_page
    from specens.analysis.trace_reader import read_trace

    page = output or (STANDARD if is_stream(trace) else trace.with_suffix(".html"))
    options.check_file("TRACE", trace)
    check_index("--output", page)
    if page.exists() and trace.exists() and page.samefile(trace):
        raise ValueError(f"--output: expected another file than the trace, got {page}")
    with progress(errors, f"reading {trace}", first=SILENT_SECONDS):
        html = render_page(read_trace(trace))
    if page == STANDARD:
        sys.stdout.write(html)
        return
    page.write_text(html, encoding="utf-8")
    Output().print(str(page), highlight=False, soft_wrap=True)


@app.command(cls=Command, short_help="List the published methods.")
def methods(json: options.Json = False) -> None:
    """List published methods by what they choose on five axes; `SpeculativeEnsemble.from_preset` builds each."""
    from specens.cli.display import methods_table
    from specens.presets import PRESETS

    if json:
        print_json({name: method.to_dict() for name, method in PRESETS.items()})
    else:
        Output().print(methods_table(PRESETS))


@app.command("vllm-config", cls=Command, short_help="Write the folder that vLLM serves an ensemble from.")
def vllm_config(
    models: options.Models,
    out: Annotated[Path, typer.Option(help="A new folder.")],
    weights: options.Weights = None,
    logit_weights: options.LogitWeights = None,
    contrast: options.Contrast = None,
    plausibility: options.Plausibility = None,
    dtype: options.Dtype = None,
    json: options.Json = False,
) -> None:
    """Write config.json and tokenizer of an ensemble: SPECENS_VLLM=1 vllm serve FOLDER.

    Folders and names of the hub stay where they are; other models are written beside the config, in --dtype.
    """
    from specens.adapters.vllm.ensemble_folder import write_ensemble
    from specens.engines.transformers.load import as_dtype

    ensemble = options.parse_ensemble(len(models), weights, logit_weights, contrast, plausibility)
    with progress(errors, f"writing {out}", first=SILENT_SECONDS):
        settings = write_ensemble(models, ensemble, out, as_dtype(dtype or "bf16", "--dtype"))
    if json:
        print_json({"folder": str(out), "kind": settings.kind, "members": list(settings.members)})
    else:
        Output().print(f"{out}: {settings.kind} of {', '.join(settings.members)}", highlight=False, soft_wrap=True)


@app.command(cls=Command, short_help="Show versions, backends and hardware.")
def doctor(json: options.Json = False, report: options.Report = False) -> None:
    """Show versions, backends and hardware, and why something is missing."""
    from specens.cli.doctor import examine, report_dict, report_markdown, report_table

    if json and report:
        raise ValueError("--report: expected one of --json and --report, got both")
    with progress(errors, "examining", first=SILENT_SECONDS):
        facts = examine()
    if json:
        print_json(report_dict(facts))
    elif report:
        print(report_markdown(facts))
    else:
        Output().print(report_table(facts))


def main() -> None:
    """The entry point of the command."""
    wait_briefly()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # rather than lose a text that the terminal cannot show
    warnings.showwarning = _show_warning  # type: ignore[assignment]
    app(prog_name="specens")


def _show_warning(message: Warning | str, *_: Any) -> None:
    errors.print(f"Warning: {message}", style="yellow", highlight=False, markup=False, soft_wrap=True)


def check_planned_without_models(context: typer.Context, given: Any) -> None:
    """Raise ValueError where something is lacking to plan for members that are not here, or an option is for models."""
    if given.costs is None or given.acceptance is None:
        raise ValueError("MODELS: expected some, or --forward-ms and --acceptance in their place")
    if given.link is not None and given.row_bytes is None:
        raise ValueError("--link: expected --row-bytes beside it without MODELS")
    for parameter in context.command.params:
        source = context.get_parameter_source(str(parameter.name))
        if source is not None and source.name == "COMMANDLINE" and parameter.name not in WITHOUT_MODELS:
            raise ValueError(f"{parameter.opts[0]}: expected MODELS beside it")


def _job(prompts: list[str] | None, chat: bool | None, input: Path | None = None, **settings: Any) -> dict[str, Any]:
    """The arguments of one generation; no prompt where a file has them."""
    if input is not None and prompts:
        raise ValueError("--prompt: expected none beside --input, which names a file of prompts")
    prompt = None if input is not None else options.read_prompt(prompts)
    return settings | {"prompt": prompt, "chat": chat}


def _as_given(context: typer.Context, name: str, value: Any) -> tuple[str, str]:
    """A setting as its option, and a value of it, in the words of the command line."""
    option = next((own for own in context.command.params if own.name == name), None)
    own = name if option is None else option.opts[0] if option.opts[0].startswith("-") else name.upper()
    if value is True:
        return own, own
    if value is None or value is False:
        return own, option.secondary_opts[0] if value is False and option and option.secondary_opts else "none"
    return own, ", ".join(map(str, value if isinstance(value, list) else [value]))


def _settings_of_texts(context: typer.Context, models: list[str]) -> dict[str, Any]:
    """The options that the texts depend on, as they were given; and the engines, which may follow from what is here."""
    from specens.engines.loading import engine_of

    given = {name: value for name, value in context.params.items() if name not in WITHOUT_EFFECT_ON_TEXTS | GRAMMARS}
    return given | {"engines": [engine_of(model)[0] for model in models]}
