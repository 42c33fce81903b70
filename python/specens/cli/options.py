"""The options that the commands share, and how their texts become arguments."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specens.files.json_lines import is_stream

if TYPE_CHECKING:
    from specens.analysis.planner import Given
    from specens.decoding.draft_lens import DraftLen
    from specens.decoding.request import Ensemble
    from specens.drafters import Drafter as Drafters
    from specens.drafters import PromptLookup, TreePlan
    from specens.settings.grammars import Grammar
    from specens.settings.prompts import MemberPrompts
    from specens_kernels import Sampling, TokenTree


Models = Annotated[
    list[str],
    typer.Argument(
        help="Members: a Hugging Face folder or name (ORGANISATION/NAME[@REVISION]), a .gguf file or package:NAME, "
        "each with an optional +ADAPTER. GGUF files are run by llama.cpp where it is installed; llama_cpp: or "
        "transformers: in front says by which."
    ),
]
Weights = Annotated[str | None, typer.Option(help="Mix probabilities with these weights: 0.5,0.5. Default: equal.")]
LogitWeights = Annotated[str | None, typer.Option(help="Mix logits with these weights, of any sign: 1.5,-0.5.")]
Contrast = Annotated[float | None, typer.Option(help="Contrastive decoding: the weight of member 1, the amateur.")]
Plausibility = Annotated[float | None, typer.Option(help="With --contrast: the share of the best probability needed.")]
DraftLens = Annotated[
    str | None,
    typer.Option(
        help="Tokens that a member drafts in a row: one number, or one a member: 5,1. Or a length that adapts: "
        "confidence:THRESHOLD:MOST, fallback:THRESHOLD:MOST or acceptance:MOST:COST. Default: 1, and 8 of lookup."
    ),
]
Drafter = Annotated[
    str | None,
    typer.Option(
        help="Who drafts under the schedule fixed, chains or trees: the number of a member, model:MODEL, "
        "lookup[:LONGEST], skip:LAYER,LAYER,..., exit:LAYERS, jacobi or lookahead[:NGRAM]; or several of these with "
        "commas, whose trees are one. Default: 0."
    ),
]
Rule = Annotated[
    str | None,
    typer.Option(
        autocompletion=lambda: ["token", "gumbel", "block", "traversal", "k_seq", "typical"],
        help="How drafts are accepted: token; gumbel (a seed is a text, whatever drafts it); under the schedule fixed "
        "also block, of trees traversal or, of independent children, k_seq, or typical. Default: token.",
    ),
]
Rules = Annotated[str | None, typer.Option("--rule", help="token, gumbel, or both: token,gumbel. Default: token.")]
Schedule = Annotated[
    str | None,
    typer.Option(
        autocompletion=lambda: ["standard", "fixed", "alternate", "parallel", "tree"],
        help="standard, fixed, alternate, parallel (drafting while verifying) or tree. Default: alternate, or what "
        "--tree and --drafter say; of a lone member fixed, with prompt lookup.",
    ),
]
Schedules = Annotated[
    str | None,
    typer.Option(
        help="What to compare with standard: fixed,alternate,parallel,tree,alternate-tree or some. Default: "
        "fixed,alternate, and tree,alternate-tree with --tree."
    ),
]


def preset_names() -> list[str]:
    """What a shell completes --preset with."""
    from specens.presets import PRESETS

    return list(PRESETS)


PRESET_HELP = (
    "A published method, see specens methods. --draft-lens tunes it, --schedule has its target written another way; "
    "other options that contradict it are refused."
)
Preset = Annotated[str | None, typer.Option(autocompletion=preset_names, help=PRESET_HELP)]
Stream = Annotated[bool, typer.Option(help="Show tokens as they come, coloured by who proposed them.")]
Seed = Annotated[int | None, typer.Option(help="Default: a new one, shown with the result.")]
ComparedEngines = Annotated[
    str | None,
    typer.Option("--engine", help="Compare engines too: transformers,llama_cpp. Default: the one of each model."),
]
Tree = Annotated[
    str | None,
    typer.Option(
        help="Draft trees: so many children on each level, 4,2,2 or, drawn, 3,2:sampled; acceptance:0.6,0.2:24, the "
        "best 24 nodes for children that are accepted so often; or a JSON file with parents or paths of a TokenTree."
    ),
]
TreeNodes = Annotated[int | None, typer.Option(help="Draft trees of so many nodes, grown by probability.")]
Prompt = Annotated[
    list[str] | None, typer.Option(help="Once for all members, or once for each. Default: standard input.")
]
Chat = Annotated[bool | None, typer.Option(help="Use the chat template. Default: where the tokenizer has one.")]
Temperature = Annotated[float, typer.Option(help="0 takes the most likely token.")]
Dtype = Annotated[
    str | None,
    typer.Option(
        help="Of the models: fp32, bf16, fp16, torch's name for it, or auto, as stored. Default: bf16; GGUF files that "
        "llama.cpp runs are as they are."
    ),
]
ModelTemperature = Annotated[
    float | None,
    typer.Option(help="0 takes the most likely token. Default: of the model's generation config, else 1."),
]
MaxNewTokens = Annotated[
    int | None, typer.Option(min=0, help="Default: of the model's generation config, else 256.", show_default=False)
]
GenerationConfig = Annotated[
    str,
    typer.Option(help="model: what no option says is as the model's generation config says. none: leave that out."),
]
Device = Annotated[
    str | None,
    typer.Option(
        help="For all models, or one for each, those that draft at the end: cuda:0,cuda:1. Default: cuda where there "
        "is a GPU, else cpu."
    ),
]
Threads = Annotated[int | None, typer.Option(help="Processor threads. Default: as torch chooses.", min=1)]
RayAddress = Annotated[
    str | None,
    typer.Option(
        help="Of the Ray cluster where ray: models and workers run, HOST:PORT. Default: RAY_ADDRESS, else one of its "
        "own."
    ),
]
RayOptions = Annotated[
    str | None,
    typer.Option(
        help="What Ray is to give the actor of each ray: model, as JSON: '{\"num_gpus\": 1}', or a list with one for "
        "each, those that draft at the end; where there are none, of each worker. Default: a GPU of the cluster each, "
        "or an even part of one where they are fewer, unless --device cpu."
    ),
]
ModelKwargs = Annotated[
    str | None,
    typer.Option(
        help='Further arguments of transformers\' from_pretrained, as JSON: \'{"device_map": "auto"}\', '
        "quantization_config, attn_implementation, trust_remote_code and others."
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Write the texts of --input in so many processes, on this machine or --ray-address, each with all MODELS "
        "and --batch-size texts at a time. --threads is then of each, by default 1.",
    ),
]
TopK = Annotated[int | None, typer.Option(help="Keep the k most likely tokens.")]
TopP = Annotated[float | None, typer.Option(help="Keep the most likely tokens up to this mass.")]
MinP = Annotated[float | None, typer.Option(help="Keep tokens with this share of the largest probability.")]
Stop = Annotated[
    list[str] | None,
    typer.Option("--stop", "--stop-strings", help="A text that ends the generation; may be repeated."),
]
RepetitionPenalty = Annotated[
    float | None, typer.Option(help="Divides positive logits of tokens that are there already, 1.1; multiplies others.")
]
NoRepeatNgramSize = Annotated[int | None, typer.Option(help="No n-gram of so many tokens comes twice.", min=1)]
JsonSchema = Annotated[
    Path | None, typer.Option(help="The text is one JSON value that suits the schema in this file.", show_default=False)
]
Regex = Annotated[str | None, typer.Option(help="The text matches this regular expression, from its start to its end.")]
LarkGrammar = Annotated[Path | None, typer.Option("--lark", help="The text follows the Lark grammar in this file.")]
MinNewTokens = Annotated[int | None, typer.Option(min=0, help="No end of sequence before so many tokens.")]
Input = Annotated[
    Path | None,
    typer.Option(
        "--input",
        help="Prompts: JSON lines with a field prompt, or messages. Standard input: -",
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        help="Texts: JSON lines. The same command continues a run that ended. Standard output: -",
    ),
]
BatchSize = Annotated[int, typer.Option(min=1, help="Texts that are generated at a time.")]
Exact = Annotated[
    bool,
    typer.Option("--exact", help="The same text in any batch: a forward for each text, so that none saves another."),
]
Samples = Annotated[int, typer.Option(min=1, help="Texts of each prompt; more than one are JSON lines.")]
Trace = Annotated[Path | None, typer.Option("--trace", help="Write what happens in each round, for specens show.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Report = Annotated[bool, typer.Option("--report", help="Print a block of text to paste into an issue.")]


def parse_grammar(json_schema: Path | None, regex: str | None, lark: Path | None) -> Grammar | None:
    """What the text must be, where an option says so. Raises ValueError naming the option."""
    given = {"--json-schema": json_schema, "--regex": regex, "--lark": lark}
    named = [option for option, value in given.items() if value is not None]
    if not named:
        return None
    if len(named) > 1:
        raise ValueError(f"{named[1]}: expected none beside {named[0]}")
    from specens.settings.grammars import Grammar

    if regex is not None:
        return Grammar("regex", regex)
    path = json_schema or lark
    assert path is not None
    check_file(named[0], path)
    text = path.read_text(encoding="utf-8")
    try:
        return Grammar.json_schema(text) if json_schema is not None else Grammar("lark", text)
    except ValueError as error:
        raise ValueError(f"{named[0]}: {error}") from error


@contextmanager
def naming(option: str) -> Iterator[None]:
    """Have a ValueError begin with the option, in place of Python's argument."""
    try:
        yield
    except ValueError as error:
        raise ValueError(re.sub(r"^[\w\[\]]+:", f"{option}:", str(error))) from None


def parse_numbers(text: str, kind: Callable[[str], Any], option: str) -> list[Any]:
    """Numbers between commas. Raises ValueError naming the option."""
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option}: expected numbers between commas, got {text!r}") from None


def parse_ensemble(
    num_models: int,
    weights: str | None,
    logit_weights: str | None,
    contrast: float | None,
    plausibility: float | None,
) -> Ensemble | None:
    """The ensemble that the options name, or None.

    Raises ValueError where they contradict each other, or are not for so many models.
    """
    from specens_kernels import Contrastive, LogitMixture, Mixture

    given = {"--weights": weights, "--logit-weights": logit_weights, "--contrast": contrast}
    named = [option for option, value in given.items() if value is not None]
    if len(named) > 1:
        raise ValueError(f"{named[1]}: expected at most one of {', '.join(given)}; got {' and '.join(named)}")
    if plausibility is not None and contrast is None:
        raise ValueError("--plausibility: expected --contrast beside it")
    if contrast is not None:
        if num_models != 2:
            raise ValueError(f"--contrast: expected two MODELS, an expert and an amateur; got {num_models}")
        with naming("--contrast"):
            Contrastive(contrast)
        return Contrastive(contrast, plausibility)
    if logit_weights is not None:
        with naming("--logit-weights"):
            return LogitMixture(_parse_weights(logit_weights, "--logit-weights", num_models))
    return None if weights is None else Mixture(_parse_weights(weights, "--weights", num_models))


def _parse_weights(text: str, option: str, num_models: int) -> list[float]:
    weights = parse_numbers(text, float, option)
    if len(weights) != num_models:
        raise ValueError(f"{option}: expected {num_models} numbers, one for each of MODELS; got {len(weights)}")
    return weights


def as_settings(sampling: dict[str, float | int | None], **others: Any) -> dict[str, Any]:
    """The settings of a generation that were given. Raises ValueError where one of the sampling is out of range."""
    as_sampling(**sampling)
    return {name: value for name, value in (sampling | others).items() if value is not None}


def as_sampling(**parameters: float | int | None) -> Sampling:
    """The sampling parameters that were given. Raises ValueError where one is out of range."""
    from specens_kernels import Sampling

    return Sampling(**{name: value for name, value in parameters.items() if value is not None})  # type: ignore[arg-type]


def parse_generation_config(text: str, **settings: float | None) -> Any:
    """As `generate` takes it. settings: in place of those of the model. Raises ValueError where it is neither."""
    if text not in ("model", "none"):
        raise ValueError(f"--generation-config: expected model or none, got {text!r}")
    given = {name: value for name, value in settings.items() if value is not None}
    if given and text == "none":
        raise ValueError("--generation-config: expected model beside settings that take the place of its own, got none")
    if given:
        from specens.engines.transformers.generation_config import GenerationConfig

        return GenerationConfig(**given)
    return None if text == "model" else text


def parse_drafter(text: str, placement: Placement) -> int | Drafters:
    """The number of a member, or a drafter that is none. Raises ValueError where the text names neither."""
    if text.lstrip("-").isdigit():
        return int(text)
    from specens import drafters

    several = re.split(r",(?=(?:model:|skip:|exit:|(?:lookup|lookahead)[,:]|lookup$|lookahead$|jacobi))", text)
    if len(several) > 1:
        members = several[0].split(",") if several[0].replace(",", "").isdigit() else several[:1]
        found = []
        for part in (*members, *several[1:]):
            own, placement = placement.split(specs_of((), part))
            found.append(parse_drafter(part, own))
        return drafters.Several(found)
    kind, _, setting = text.partition(":")
    numbers = [int(part) for part in setting.split(",")] if setting.replace(",", "").isdigit() else []
    if kind == "model" and setting:
        return drafters.DraftModel(setting, **placement.apply([setting]))
    with naming("--drafter"):
        if kind == "lookup" and (not setting or len(numbers) == 1):
            return drafters.PromptLookup(max_match=numbers[0]) if numbers else drafters.PromptLookup()
        if kind == "lookahead" and (not setting or len(numbers) == 1):
            return drafters.Lookahead(*numbers)
        if kind == "skip" and numbers:
            return drafters.LayerSkip(numbers)
        if kind == "exit" and len(numbers) == 1:
            return drafters.LayerSkip(exit_layer=numbers[0])
    if text == "jacobi":
        return drafters.Jacobi()
    expected = "the number of a member, model:MODEL, lookup[:N], skip:N,N,..., exit:N, jacobi or lookahead[:N]"
    raise ValueError(f"--drafter: expected {expected}; got {text!r}")


def by_engines(models: list[str], engines: str | None) -> list[list[str]]:
    """The models for each engine between commas. Raises ValueError where there is none of such a name."""
    from specens.engines.loading import ENGINES

    if engines is None:
        return [models]
    names = engines.split(",")
    for name in names:
        if name not in ENGINES:
            raise ValueError(f"--engine: expected some of {', '.join(ENGINES)}, got {name!r}")
    return [[f"{name}:{model}" for model in models] for name in names]


def parse_compared_rules(text: str | None) -> list[str]:
    """The rules that `compare` shows every schedule by. Raises ValueError for one that not every schedule takes."""
    rules = ["token"] if text is None else text.split(",")
    if any(rule not in ("token", "gumbel") for rule in rules):
        raise ValueError(f"--rule: expected token, gumbel or both, which every schedule takes; got {text!r}")
    return rules


def parse_planned(text: str | None, num_models: int) -> PromptLookup | None:
    """The lookup that `plan` looks at beside members. Raises ValueError where the text names another drafter."""
    from specens.drafters import PromptLookup

    if text is None:
        return PromptLookup() if num_models == 1 else None
    kind, _, longest = text.partition(":")
    if kind != "lookup" or (":" in text and not longest.isdigit()):
        raise ValueError(
            f"--drafter: expected lookup or lookup[:LONGEST], got {text!r}; every member is planned for, and a model "
            "that only drafts is a member of weight 0"
        )
    with naming("--drafter"):
        return PromptLookup(max_match=int(longest)) if longest else PromptLookup()


def parse_given(
    num_members: int,
    forward_ms: str | None,
    acceptance: str | None,
    devices: str | None,
    link: str | None,
    row_bytes: int | None,
) -> Given:
    """What `plan` takes in place of what it measures. Raises ValueError naming the option that is wrong."""
    from specens.analysis.planner import Given, GroupCost, Link

    def of_each(text: str, kind: Callable[[str], Any], option: str) -> list[Any]:
        numbers = parse_numbers(text, kind, option)
        if len(numbers) != num_members:
            raise ValueError(f"{option}: expected {num_members} numbers, one for each member; got {len(numbers)}")
        return numbers

    def milliseconds(text: str) -> tuple[float, float]:
        one, each = text.split(":") if ":" in text else (text, "0")
        return float(one), float(each)

    given: dict[str, Any] = {"row_bytes": row_bytes}
    if forward_ms is not None:
        pairs = of_each(forward_ms, milliseconds, "--forward-ms")
        if not all(0 < one < math.inf and 0 <= each < math.inf for one, each in pairs):
            raise ValueError(f"--forward-ms: expected times above 0, got {forward_ms!r}")
        costs = [(one / 1000, (one + each) / 1000) for one, each in pairs]
        given["costs"] = [GroupCost({1: one, 2: two}, one) for one, two in costs]
    if acceptance is not None:
        given["acceptance"] = chances = of_each(acceptance, float, "--acceptance")
        if not all(0 <= chance <= 1 for chance in chances):
            raise ValueError(f"--acceptance: expected numbers from 0 to 1, got {acceptance!r}")
    if devices is not None:
        given["devices"] = numbers = tuple(of_each(devices, int, "--devices"))
        if min(numbers) < 0:
            raise ValueError(f"--devices: expected numbers from 0 on, got {devices!r}")
    if row_bytes is not None and link is None:
        raise ValueError("--row-bytes: expected --link beside it, which rows pass")
    if link is not None:
        if not any(given.get("devices", ())):
            raise ValueError("--link: expected --devices beside it, one of them not 0, where texts are verified")
        try:
            gbit, microseconds = map(float, link.split(":"))
        except ValueError:
            gbit = microseconds = -1.0
        if not (gbit > 0 and 0 <= microseconds < math.inf):
            raise ValueError(f"--link: expected GBIT_A_SECOND:MICROSECONDS, such as 100:20; got {link!r}")
        given["link"] = Link(microseconds / 1e6, gbit * 1e9 / 8)
    return Given(**given)


def parse_draft_lens(text: str) -> DraftLen | list[int]:
    """One length for all members, a number or one that adapts, or a list with a number for each."""
    kind, _, setting = text.partition(":")
    if kind in ("confidence", "fallback", "acceptance"):
        from specens.decoding.draft_lens import ByAcceptance, ByConfidence

        is_acceptance = kind == "acceptance"
        try:
            first, second = setting.split(":")
            most, number = (int(first), float(second)) if is_acceptance else (int(second), float(first))
        except ValueError:
            form = "MOST:COST" if is_acceptance else "THRESHOLD:MOST"
            raise ValueError(f"--draft-lens: expected {kind}:{form}, got {text!r}") from None
        with naming("--draft-lens"):
            return ByAcceptance(most, number) if is_acceptance else ByConfidence(number, most, kind == "fallback")
    lens = parse_numbers(text, int, "--draft-lens")
    return lens[0] if len(lens) == 1 else lens


def parse_tree(tree: str | None, tree_nodes: int | None, schedule: str | None = None) -> TreePlan | None:
    """The draft trees that the options name, or None.

    Raises ValueError where both do, where no tree is what one says, or where the schedule has none.
    """
    from specens.drafters import TreePlan

    if schedule not in (None, "fixed", "alternate", "tree") and (tree, tree_nodes) != (None, None):
        raise ValueError(f"--schedule: expected fixed or alternate beside --tree and --tree-nodes; got {schedule!r}")
    if tree is not None and tree_nodes is not None:
        raise ValueError("--tree-nodes: expected at most one of --tree, --tree-nodes; got both")
    if tree is None and tree_nodes is None:
        return None
    shape, _, children = (tree or "").partition(":")
    with naming("--tree-nodes" if tree is None else "--tree"):
        if tree is None:
            return TreePlan(nodes=tree_nodes)
        if shape.replace(",", "").isdigit():
            return TreePlan(branches=tuple(parse_numbers(shape, int, "--tree")), children=children or "top")
        return TreePlan(shape=_parse_shape(tree))


def _parse_shape(text: str) -> TokenTree:
    """A TokenTree from acceptance by rank and a number of nodes, or from a file."""
    from specens_kernels import TokenTree

    kind, _, setting = text.partition(":")
    if kind == "acceptance":
        rates, _, nodes = setting.partition(":")
        if not nodes.isdigit():
            raise ValueError(f"--tree: expected acceptance:RATE,RATE,...:NODES, got {text!r}")
        return TokenTree.best_for_acceptance(parse_numbers(rates, float, "--tree"), int(nodes))
    path = Path(text)
    if not path.is_file():
        raise ValueError(
            f"--tree: expected numbers of children such as 4,2,2, acceptance:... or a JSON file; got {text!r}"
        )
    try:
        values = json.loads(path.read_text())
        return TokenTree.from_paths(values) if values and isinstance(values[0], list) else TokenTree(values)
    except (ValueError, TypeError) as error:
        raise ValueError(f"--tree: expected the parents or paths of a TokenTree in {text}: {error}") from None


OBJECTS = {  # options that are JSON, with what is expected of them
    "ray_options": """a JSON object such as '{"num_gpus": 1}', or a list with one for each ray: model""",
    "model_kwargs": """a JSON object such as '{"device_map": "auto"}'""",
}


def parse_object(name: str, text: str | None) -> Any:
    """Arguments by their names, or of ray_options a list of such. Raises ValueError where the text is neither."""
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    listed = value if name == "ray_options" and isinstance(value, list) else [value]
    if not value or not all(isinstance(own, dict) for own in listed):
        raise ValueError(f"--{name.replace('_', '-')}: expected {OBJECTS[name]}; got {text!r}")
    return value


@dataclass(frozen=True)
class Placement:
    """Where and how models compute, as the options say."""

    dtype: str | None
    device: str | None
    threads: int | None
    ray_address: str | None = None
    ray_options: dict[str, Any] | list[dict[str, Any]] | None = None
    workers: int | None = None
    model_kwargs: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, context: typer.Context) -> Placement:
        """As the options of a call say. Raises ValueError where one of them is something else."""
        given = {field.name: context.params.get(field.name) for field in fields(cls)}
        parsed = {name: parse_object(name, given[name]) for name in ("ray_options", "model_kwargs")}
        return cls(**given | parsed)

    @property
    def devices(self) -> list[str] | None:
        """One for each model, where the option says more than one."""
        listed = [own.strip() for own in (self.device or "").split(",")]
        return listed if len(listed) > 1 else None

    def check(self, models: Sequence[str]) -> None:
        """Raise ValueError where an option is for other models."""
        if self.devices is not None and len(self.devices) != len(models):
            raise ValueError(
                f"--device: expected one, or one for each of {len(models)} models, those that draft at the end; got "
                f"{self.device}"
            )
        if self.devices is not None and num_in_actors(models):
            raise ValueError(f"--device: expected one beside models with ray: before them, got {self.device}")
        uses_ray = self.workers is not None or num_in_actors(models) > 0
        for option, given in (("--ray-address", self.ray_address), ("--ray-options", self.ray_options)):
            if given is not None and not uses_ray:
                raise ValueError(f"{option}: expected a model with ray: before it, got {', '.join(models)}")
        if not isinstance(self.ray_options, list):
            return
        if not (num_actors := num_in_actors(models)):
            raise ValueError(f"--ray-options: expected one object for all workers, got {self.ray_options}")
        if len(self.ray_options) != num_actors:
            raise ValueError(
                f"--ray-options: expected one object, or one for each of {num_actors} models with ray: before them, "
                f"those that draft at the end; got {len(self.ray_options)}"
            )

    def split(self, models: Sequence[str]) -> tuple[Placement, Placement]:
        """Of the first models, these, and of those after them: each may have a device, an actor its options."""
        first, last = self, self
        if isinstance(self.ray_options, list):
            num_actors = num_in_actors(models)
            first = replace(first, ray_options=self.ray_options[:num_actors])
            last = replace(last, ray_options=self.ray_options[num_actors:])
        if self.devices is not None:
            first = replace(first, device=",".join(self.devices[: len(models)]))
            last = replace(last, device=",".join(self.devices[len(models) :]))
        return first, last

    def join(self) -> None:
        """Have `engines.ray` join the cluster that is named."""
        if self.ray_address is not None:
            os.environ["RAY_ADDRESS"] = self.ray_address

    def share_of_gpus(self, num_actors: int) -> dict[str, Any]:
        """What Ray is to give each of so many actors, where nobody says: an even part of the cluster's GPUs."""
        from specens.engines.ray import options_unless_given

        self.join()
        kinds = sorted(own.partition(":")[0] for own in self.devices or [self.device or ""])
        return options_unless_given(num_actors, kinds[-1])  # "cpu" only where all are

    def apply(self, models: Sequence[str]) -> dict[str, Any]:
        """Set the threads of torch; what these models are loaded with. Raises ValueError where the dtype is unknown."""
        import torch

        from specens.engines.transformers.load import as_dtype

        dtype = None if self.dtype is None else as_dtype(self.dtype, "--dtype")
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        self.join()
        own: dict[str, Any] = {"ray_options": self.ray_options} if num_in_actors(models) else {}
        own |= {} if self.model_kwargs is None else {"model_kwargs": self.model_kwargs}
        return {"dtype": dtype, "device": self.devices or self.device, **own}


def specs_of(models: Sequence[str], drafter: str | None) -> list[str]:
    """The models, and those that draft."""
    return [*models, *re.findall(r"(?:^|,)model:([^,]+)", drafter or "")]


def num_in_actors(models: Sequence[str]) -> int:
    """How many models have a Ray actor each."""
    from specens.engines.loading import engine_of

    return sum(engine_of(model)[0] == "ray" for model in models)


def read_prompt(prompts: Sequence[str] | None) -> str | MemberPrompts:
    """The prompt of all members, or one for each; without the option, standard input. Raises ValueError on none."""
    if prompts:
        from specens.settings.prompts import MemberPrompts

        return prompts[0] if len(prompts) == 1 else MemberPrompts(prompts)
    data = b"" if sys.stdin.isatty() else sys.stdin.buffer.read()
    try:
        text = data.decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        got = f"the byte 0x{data[error.start]:02x} at {error.start}"
        raise ValueError(f"--prompt: expected text in UTF-8 on standard input, got {got}") from None
    if not text:
        raise ValueError("--prompt: expected a text, here or on standard input; got none")
    return text


def check_file(option: str, path: Path) -> None:
    """Raise ValueError where there is no file to be read."""
    if is_stream(path):
        return
    if not path.exists() or path.is_dir():
        raise ValueError(
            f"{option}: expected a file, got {path}, which {'is a folder' if path.is_dir() else 'is not there'}"
        )
