"""The command `specens chat`: turns of a user and of an ensemble, each read with all before it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specens.cli import INTERRUPTED, options
from specens.cli.config import Config, SaveConfig
from specens.cli.exits import Output, errors, print_json
from specens.cli.models import load

if TYPE_CHECKING:
    from specens.generate import Generation, SpeculativeEnsemble

COMMANDS = {"/reset": "forgets what was said", "/exit": "ends, as Ctrl-D does"}
PROMPT = "> "

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object a turn and nothing else.")]


def chat(
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
    system: Annotated[str | None, typer.Option(help="What is said first, as the system.")] = None,
    temperature: options.ModelTemperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    max_new_tokens: options.MaxNewTokens = None,
    min_new_tokens: options.MinNewTokens = None,
    repetition_penalty: options.RepetitionPenalty = None,
    no_repeat_ngram_size: options.NoRepeatNgramSize = None,
    stop: options.Stop = None,
    generation_config: options.GenerationConfig = "model",
    seed: options.Seed = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    threads: options.Threads = None,
    model_kwargs: options.ModelKwargs = None,
    ray_address: options.RayAddress = None,
    ray_options: options.RayOptions = None,
    stream: options.Stream = True,
    json: Json = False,
) -> None:
    """Talk with the ensemble of MODELS: each line is a turn, read with all that was said before by the chat template.

    /reset forgets it, /exit or Ctrl-D ends, Ctrl-C ends an answer. Lines may be piped; a --seed gives the same answers.
    """
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    settings = options.as_settings(
        sampling,
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        stop_strings=stop,
        generation_config=options.parse_generation_config(
            generation_config, repetition_penalty=repetition_penalty, no_repeat_ngram_size=no_repeat_ngram_size
        ),
    )
    mixture = options.parse_ensemble(len(models), weights, logit_weights, contrast, plausibility)
    trees = options.parse_tree(tree, tree_nodes, schedule)
    how: dict[str, Any] = {"schedule": schedule, "drafter": drafter, "tree": trees, "rule": rule, "preset": preset}
    placement = options.Placement.of(context)
    ensemble = load(context, models, placement, ensemble=mixture, draft_lens=draft_lens, **how)
    if getattr(ensemble.tokenizer, "chat_template", None) is None:
        raise ValueError(f"MODELS: expected a tokenizer with a chat template, got none in {models[0]}")
    _talk(Chat(ensemble, settings, system, seed), stream and not json, json)


class Chat:
    """What was said, in memory, and how it goes on. system: said first. seed: of the first answer; None draws one."""

    def __init__(
        self, ensemble: SpeculativeEnsemble, settings: dict[str, Any], system: str | None, seed: int | None
    ) -> None:
        self._ensemble, self._settings, self._given_seed = ensemble, settings, seed
        self._beginning = [] if system is None else [{"role": "system", "content": system}]
        self.reset()

    def reset(self) -> None:
        """Forget what was said: with a given seed the same questions have the same answers again."""
        from specens.settings.jobs import draw_seed

        self.messages = list(self._beginning)
        self.num_answers = 0
        self._seed = draw_seed() if self._given_seed is None else self._given_seed

    def answer(self, text: str, stream: bool) -> Generation:
        """The answer to what a user says. Raises as `generate`, and then that was not said."""
        from specens.cli import commands
        from specens.settings.jobs import derived_seed

        said = [*self.messages, {"role": "user", "content": text}]
        job = self._settings | {"prompt": said, "seed": derived_seed(self._seed, self.num_answers, 0)}
        generation = commands.generate_shown(self._ensemble, job, Output(), stream)
        self.messages = [*said, {"role": "assistant", "content": generation.text}]
        self.num_answers += 1
        return generation


def _talk(talk: Chat, stream: bool, json: bool) -> None:
    from specens.cli import commands

    by_hand = sys.stdin.isatty()
    if by_hand:
        errors.print(f"{_commands()}. Ctrl-C ends an answer.", style="dim", highlight=False, soft_wrap=True)
    for line in _typed() if by_hand else _piped():
        if line == "/exit":
            return
        if line == "/reset":
            talk.reset()
            continue
        try:
            if line.startswith("/") and line[1:].isalpha():
                raise ValueError(f"{line}: no such command; {_commands()}")
            generation = talk.answer(line, stream)
        except ValueError as error:
            if not by_hand:
                raise
            errors.print(f"Error: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
            continue
        if json:
            print_json({"turn": talk.num_answers, "prompt": line} | generation.to_dict())
        else:
            commands.print_result(generation, Output(), stream)
        if generation.interrupted and not by_hand:
            raise typer.Exit(INTERRUPTED)


def _commands() -> str:
    return ", ".join(f"{name} {what}" for name, what in COMMANDS.items())


def _piped() -> Iterator[str]:
    """The lines of standard input that say anything."""
    return filter(None, (line.strip() for line in iter(sys.stdin.readline, "")))


def _typed() -> Iterator[str]:
    """What is typed, line by line, with what readline has for it, up to Ctrl-D."""
    with suppress(ImportError):
        import readline  # noqa: F401  input() then has the arrow keys
    ask = input if sys.stdout.isatty() else _ask_beside
    while True:
        try:
            if line := ask(PROMPT).strip():
                yield line
        except KeyboardInterrupt:
            errors.print("\nCtrl-D or /exit ends", style="dim", highlight=False)
        except EOFError:
            errors.print("")
            return


def _ask_beside(prompt: str) -> str:
    """As input(), with the prompt where it is not among the answers."""
    errors.print(prompt, end="", highlight=False)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line
