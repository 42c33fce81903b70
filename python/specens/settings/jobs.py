"""What a user asks for, prompt by prompt, turned into tasks."""

from __future__ import annotations

import hashlib
import secrets
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypedDict

from specens.decoding.masks import Constraint
from specens.decoding.processors import LogitsProcessor, as_processors
from specens.decoding.request import Ensemble, Task
from specens.settings.arguments import (
    as_stop_strings,
    as_stop_tokens,
    as_switch,
    check_caches,
    check_drafter,
    check_lengths,
    check_task,
    complete_ensemble,
    with_numbers,
)
from specens.settings.grammars import Grammar, constraint_of
from specens.settings.model_settings import ModelSettings, as_processing
from specens.settings.prompts import MemberPrompts, prompts_for_members
from specens.targets import DenseTarget
from specens_kernels import Processing, Sampling

if TYPE_CHECKING:
    from specens.generate import SpeculativeEnsemble

PARAMETERS = ("temperature", "top_k", "top_p", "min_p")
SEEDS = 2**63  # from -SEEDS to SEEDS - 1


def draw_seed() -> int:
    """A seed that nobody chose."""
    return secrets.randbits(63)


def derived_seed(seed: int, index: int, sample: int) -> int:
    """The seed of one of many texts: that of the call for the first one, else a hash of it and the text's numbers.

    So the texts of two seeds have no seed in common, however near the seeds are (but for a chance of 2^-64 a pair).
    """
    if index == sample == 0:
        return seed
    return struct.unpack("<q", hashlib.blake2b(struct.pack("<qqq", seed, index, sample), digest_size=8).digest())[0]


class Settings(TypedDict, total=False):
    """The keyword arguments of `SpeculativeEnsemble.generate` and `generate_many`.

    What is not given here is as the generation config of the first member with a weight says, and else the default.

    max_new_tokens (256), min_new_tokens (0): how long a text is. stop_tokens: ids that end it; None takes the end of
        sequence of models and tokenizer, () never stops. stop_strings, or stop: what ends it, also across the
        borders of tokens and in special tokens, but not before min_new_tokens; it is no part of the text, which ends
        where it begins.
    skip_special_tokens (True): show no text of special tokens. The text is what the tokenizer's `decode` makes of all
        tokens up to its end, with the clean-up of spaces that the tokenizer is set to.
    sampling: all of how tokens are drawn; temperature 1 by default. temperature, top_k, top_p, min_p, do_sample: in its
        place, one by one, the others as the generation config says. Any of them samples; temperature=0 and
        do_sample=False are greedy. do_sample=True, here or in the config, has transformers' top_k of 50 unless another
        is said.
    generation_config: a `transformers.GenerationConfig`, completed from the member's, or "none" to leave that out.
    seed: of the first text's randomness, None draws one for each; those of further texts are derived from it
        (`derived_seed`) and told with each. chat: put text through the chat template. logprobs: return them.
    top_logprobs (0): tell with each token so many of the most likely ones at its place.
    processing: a `specens_kernels.Processing` with logit bias and penalties, without tables of tokens. The prompt that
        a repetition penalty looks at is member 0's.
    logits_processors: functions of the ids so far [1, tokens] and logits [1, vocab], as those of transformers; for
        every member's logits. They must depend on nothing else, since they are called for each member and draft, and
        again for a position whose draft was rejected; those that need more are refused (`decoding.processors`), others
        that keep a state are noticed where a second call for the first row says something else. Never called after a
        stop token or a draft that the constraint excludes.
    constraint: a function of the generated tokens that returns the bit mask int32 [words] of the tokens that may come
        next, in the layout of xgrammar, or None where the text is complete, which ends it. It is asked after drafts,
        and again for a text that is shorter or goes on otherwise once they are rejected; never after a stop token,
        behind its own end, or behind a token that its mask excludes.
    grammar: in its place, what the text must be: a `Grammar`, or a JSON schema, a dict or a class of pydantic, of which
        it is one value. It needs the package llguidance and a fast tokenizer.
    """

    max_new_tokens: int | None
    min_new_tokens: int | None
    sampling: Sampling | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    do_sample: bool | None
    generation_config: Any
    seed: int | None
    chat: bool
    stop_tokens: Sequence[int] | None
    stop_strings: Sequence[str]
    skip_special_tokens: bool
    stop: str | Sequence[str] | None
    logprobs: bool
    top_logprobs: int
    processing: Processing | None
    logits_processors: Sequence[LogitsProcessor]
    constraint: Constraint | None
    grammar: Grammar | Mapping[str, Any] | type | None


@dataclass(frozen=True)
class Job:
    """A prompt for `generate_many` with settings of its own; what is None is as in that call.

    ensemble: of the same kind or another than the others', for the same members: weights a request. temperature, top_k,
        top_p, min_p: in place of these of the call, the others as there.
    """

    prompt: Any
    ensemble: Ensemble | None = None
    sampling: Sampling | None = None
    seed: int | None = None
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    stop_strings: Sequence[str] | None = None
    processing: Processing | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    logits_processors: Sequence[LogitsProcessor] | None = None
    grammar: Grammar | Mapping[str, Any] | type | None = None

    def over(self, settings: Settings) -> Settings:
        """The settings of a call, and in their place those of this job."""
        names = [field.name for field in fields(self) if field.name not in ("prompt", "ensemble")]
        own = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.stop_strings is not None:
            settings = {name: value for name, value in settings.items() if name != "stop"}  # type: ignore[assignment]
        parameters = {name: own[name] for name in PARAMETERS if name in own}
        whole = settings.get("sampling")
        if self.sampling is not None:
            settings = {name: value for name, value in settings.items() if name not in (*PARAMETERS, "do_sample")}  # type: ignore[assignment]
        elif whole is not None and parameters:
            own = {name: value for name, value in own.items() if name not in PARAMETERS}
            own["sampling"] = replace(whole, **parameters)
        return {**settings, **own}  # type: ignore[typeddict-item]


def check_many(prompts: Any, batch_size: int, samples: int, exact: bool) -> None:
    """Raise ValueError where an argument of `generate_many` is wrong."""
    for name, value in (("batch_size", batch_size), ("samples", samples)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}: expected an integer >= 1, got {value!r}")
    as_switch("exact", exact, False)
    if isinstance(prompts, (str, bytes, Mapping, MemberPrompts)) or not isinstance(prompts, Iterable):
        raise ValueError(f"prompts: expected several, such as a list, got {type(prompts).__name__}")


class TaskMaker:
    """Turns the jobs of one call into tasks. Raises TypeError where the call has a setting that there is none of."""

    def __init__(self, owner: SpeculativeEnsemble, settings: Settings) -> None:
        unknown = sorted(set(settings) - set(Settings.__annotations__))
        if unknown:
            raise TypeError(f"{unknown[0]}: no such setting; there are {', '.join(Settings.__annotations__)}")
        self._owner = owner
        self._settings = settings
        self._of_models = ModelSettings(owner, settings)
        self._end_of_sequence = self._of_models.end_of_sequence or frozenset(owner.end_of_sequence)

    def __call__(self, job: Job, index: int, sample: int) -> Task:
        """The task of one text of a prompt; raises ValueError where a setting is wrong."""
        owner, own = self._owner, job.over(self._settings)
        own["logits_processors"] = processors = as_processors(own.get("logits_processors", ()))
        num_members = owner.plan.num_members
        given, top = own.get("stop_tokens"), own.get("top_logprobs")
        top = 0 if top is None else top
        stop_tokens = self._end_of_sequence if given is None else as_stop_tokens(given)
        prompts = prompts_for_members(
            job.prompt, num_members, owner.tokenizer, as_switch("chat", own.get("chat"), False)
        )
        ensemble = owner.ensemble if job.ensemble is None else complete_ensemble(job.ensemble, num_members)
        lengths = self._of_models.lengths(own, prompts)
        found = self._of_models.wishes(own, ensemble, prompts, stop_tokens, lengths.max_new_tokens)
        task = Task(
            prompts=prompts,
            ensemble=ensemble,
            sampling=found.sampling,
            seed=draw_seed() if own.get("seed") is None else own["seed"],  # type: ignore[arg-type]
            max_new_tokens=lengths.max_new_tokens,
            min_new_tokens=lengths.min_new_tokens,
            stop_tokens=stop_tokens,
            stop_strings=as_stop_strings(lengths.stop_strings, owner.tokenizer),
            skip_special_tokens=as_switch("skip_special_tokens", own.get("skip_special_tokens"), True),
            logprobs=as_switch("logprobs", own.get("logprobs"), False) or bool(isinstance(top, int) and top),
            top_logprobs=top,
            processing=as_processing(found, own.get("processing")),
            logits_processors=processors,
            model_processors=found.processors,
            constraint=constraint_of(own, owner.tokenizer, stop_tokens),
            rule=owner.plan.rule,
            index=index,
            sample=sample,
        )
        self._check(task)
        seed = derived_seed(task.seed, 0 if job.seed is not None else index, sample)
        return replace(with_numbers(task), seed=seed)

    def _check(self, task: Task) -> None:
        owner = self._owner
        check_task(task)
        check_lengths(owner.models, task.prompts, task.max_new_tokens)
        num_nodes = owner.plan.most_nodes
        check_drafter(owner.plan.drafter, task.prompts, task.max_new_tokens, num_nodes)
        if isinstance(task.ensemble, DenseTarget) and (task.processing or task.min_new_tokens):
            kind = type(task.ensemble).__name__
            raise ValueError(f"ensemble: expected none of kind {kind} with processing or min_new_tokens")
        check_caches(owner.models, task.prompts, task.max_new_tokens, num_nodes)
