"""Text from the ensemble of several language models, by speculation among them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from specens.decoding.batch import Batch
from specens.decoding.draft_lens import DraftLen
from specens.decoding.request import Ensemble, Event, Request, Task
from specens.decoding.scorer import Scorer
from specens.decoding.statistics import Statistics
from specens.decoding.stream import Stream
from specens.decoding.trace import Round, Tracer
from specens.decoding.views import generation_html, generation_repr
from specens.drafters import Drafter, TreePlan
from specens.engines.loading import Device, RayOptions
from specens.engines.protocol import Engine, Needs, running
from specens.presets import preset
from specens.schedules import SCHEDULES
from specens.schedules.plan import Rule
from specens.settings.arguments import (
    check_callbacks,
    check_members,
    check_rule,
    check_trees,
    check_weights_of_drafter,
    choose_schedule,
    complete_ensemble,
    group_by_weights,
    indices_read_together,
    load_members,
    make_plan,
    with_weight_of_drafter,
)
from specens.settings.jobs import Job, Settings, TaskMaker, check_many

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from specens_kernels import TokenTree

Report = Callable[[Request, list[Event]], None]


@dataclass(repr=False)
class Generation:
    """A generated text. It prints as its text, and shows in a notebook who drafted what.

    tokens: all emitted ids, the end of sequence included. text: of the tokens, without special tokens and up to a stop
        string; the joined texts of the events. logprobs: under the target distribution, one a token, or None unless
        asked for. finish_reason: "stop" (end of sequence, stop string), "length" (max_new_tokens) or "interrupted".
    seed: reproduces the text. index: the number of its prompt, sample: of the text among those of this prompt.
    """

    text: str
    tokens: list[int]
    logprobs: list[float | None] | None
    events: list[Event]
    statistics: Statistics
    finish_reason: str
    seed: int
    index: int = 0
    sample: int = 0

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended it early."""
        return self.finish_reason == "interrupted"

    def __repr__(self) -> str:
        return generation_repr(self)

    def _repr_html_(self) -> str:
        return generation_html(self)

    def to_dict(self) -> dict:
        """Everything as plain values for JSON."""
        return {
            "text": self.text,
            "tokens": self.tokens,
            "logprobs": self.logprobs,
            "finish_reason": self.finish_reason,
            "interrupted": self.interrupted,
            "seed": self.seed,
            "index": self.index,
            "sample": self.sample,
            "statistics": self.statistics.to_dict(),
            "events": [event.to_dict() for event in self.events],
        }


class SpeculativeEnsemble:
    """An ensemble of Hugging Face causal language models with one tokenizer.

    members: loaded models, or model specs (`engines.transformers.load.resolve_model`); equal specs are loaded once.
        A model that should have another cache than a DynamicCache comes in a `engines.transformers.causal_lm.CausalLM`.
    tokenizer: of all members, or the spec of a model that has it; None takes the one of the first spec. Without one,
        prompts and results are token ids.
    ensemble: Mixture, LogitMixture or Contrastive; None is the lone member, or the equal-weight Mixture of several.
        A member of weight 0 only drafts: Mixture((1, 0)) is the speculative decoding of member 0.
    draft_lens: how many tokens a member drafts in a row; one number, or one for each member. A length that adapts to
        the text may stand for a number, see `specens.decoding.draft_lens`. None is 1, and 8 of a PromptLookup.
    schedule: "standard", "fixed" (`drafter` drafts), "alternate" (members draft for each other), "parallel" (`drafter`
        drafts on while the others verify), or "tree", which is "fixed" with `tree`, by default (4, 2, 2). None is
        "fixed" beside `tree` or a Drafter, else "alternate"; of a lone member it is "fixed" with a PromptLookup, which
        needs no other model.
    drafter: the index of the member that drafts (None: 0), or a `specens.drafters.Drafter`, which is none: then all
        members score, and there may be one. "fixed" takes any, "parallel" a DraftModel. Under "alternate" the member
        that proposes after a rejection; None: that with the longest chains, of equal ones that whose last turn is
        longest ago.
    tree: draft trees in the place of chains, under "fixed", whoever drafts, and of the members under "alternate": the
        number of children on each level, such as (4, 2, 2), a TokenTree, or a TreePlan, which may grow.
    rule: how drafts are accepted, as in `specens_kernels.verify_chain`: under every schedule "token" or "gumbel", by
        which a seed is a text: the same under `standard` and with any drafter, draft length, tree and batch, as far as
        the members' logits are the same. Under "fixed" also "block", of trees "traversal" and, of "independent"
        children, "k_seq", and what changes the text: "typical", Typical, of chains Threshold. Replacement and
        DecisionTree are CoSD [Wang et al., 2025]: the drafter writes, and the ensemble of the others, the assistant,
        replaces tokens where the rule says so.
    dtype, device, revision: for members given as specs, refused where there is none. A torch.dtype or its name, "auto"
        for that of each checkpoint, None for bfloat16; None is the GPU where there is one, and a list has one for each
        member; a branch, tag or commit of names of the hub.
    ray_options: what Ray is to give the actors of specs with `ray:` before them (num_gpus, num_cpus, resources, ...),
        each or all alike; None: a GPU of the cluster each, or an even part of one where they are fewer, unless device
        is "cpu".
    model_kwargs: of specs that transformers runs, further arguments of its `from_pretrained`: device_map,
        quantization_config, attn_implementation, trust_remote_code (False) and others. Quantised weights are
        not cast, and what has a device_map is not moved.
    Raises ValueError where an argument is wrong or the schedule has no use for it, where tokenizers differ, or where a
        member's cache cannot be rolled back as its schedule needs.
    """

    def __init__(
        self,
        members: Sequence[Any],
        tokenizer: Any | None = None,
        ensemble: Ensemble | None = None,
        draft_lens: DraftLen | Sequence[DraftLen] | None = None,
        schedule: str | None = None,
        *,
        drafter: int | Drafter | None = None,
        tree: TreePlan | TokenTree | Sequence[int] | None = None,
        rule: Rule = "token",
        dtype: str | torch.dtype | None = None,
        device: Device | Sequence[Device] = None,
        revision: str | None = None,
        ray_options: RayOptions = None,
        model_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        check_members(members)
        schedule, drafter, tree = choose_schedule(len(members), schedule, drafter, tree, draft_lens)
        plan = make_plan(members, draft_lens, drafter, tree, rule)
        self.schedule_name = schedule
        self.schedule = SCHEDULES[schedule]
        self.schedule(plan)  # raises where the plan does not suit it
        self.ensemble = complete_ensemble(ensemble, plan.num_members)
        self.plan = with_weight_of_drafter(plan, self.ensemble)
        check_rule(self.plan, schedule)
        self.models, self.tokenizer = load_members(
            members, tokenizer, dtype, device, revision, ray_options, model_kwargs
        )
        if not isinstance(plan.drafter, int):
            bound = plan.drafter.bind(self.models, self.tokenizer)
            self.plan, self.models = replace(self.plan, drafter=bound), bound.members(self.models)
        for model in self.models:
            model.check(self._needs(1))
        if plan.tree is not None:
            check_trees(self.models, plan.tree)
        if schedule == "parallel":
            check_weights_of_drafter(self.models, self.plan.drafter)

    @classmethod
    def from_preset(cls, name: str, members: Sequence[Any], **arguments: Any) -> SpeculativeEnsemble:
        """A published method by its name, see `specens methods`.

        arguments: as of the class, in place of what the method chooses; of drafts, what it chooses for another
        schedule than schedule= is left out.
        Raises ValueError where there is no such method, or it is for other members, or needs an argument.
        """
        method = preset(name)
        method.check_members(name, len(members))
        if method.needs is not None and method.needs not in arguments:
            raise ValueError(f"{method.needs}: expected one for {name}, got none")
        return cls(members, **(method.settings_under(arguments.get("schedule"), len(members)) | arguments))

    def generate(
        self,
        prompt: Any,
        *,
        on_tokens: Callable[[list[Event]], None] | None = None,
        on_round: Callable[[Round], None] | None = None,
        **settings: Unpack[Settings],
    ) -> Generation:
        """Generate from one prompt; several are for `generate_many`.

        prompt: text, token ids or chat messages; or MemberPrompts, with one of these for each member. on_tokens: called
        after each round with the events of its tokens, to stream them. on_round: called then too, with all that is
        known of the round. settings: see `Settings`.
        KeyboardInterrupt ends the generation and returns what was settled, with `interrupted` True.
        Raises ValueError where an argument is wrong; RuntimeError where no token has positive probability.
        """
        check_callbacks(on_tokens=on_tokens, on_round=on_round)
        make_task = TaskMaker(self, settings)
        request = self._request(make_task(Job(prompt), 0, 0))
        reports = [] if on_tokens is None else [lambda _, events: on_tokens(events)]
        batch = self._batch(1, reports, on_round)
        interrupted = False
        try:
            with torch.inference_mode(), running(self._all_models):
                list(batch.run([request]))
        except KeyboardInterrupt:
            interrupted = True
            request.finish()
        return _generation(request, interrupted)

    def stream(
        self, prompt: Any, *, on_round: Callable[[Round], None] | None = None, **settings: Unpack[Settings]
    ) -> Stream:
        """Generate from one prompt, token by token: an iterator of events, also `async for event in ...`.

        Rounds run as their tokens are asked for. `Stream.close()`, or the end of a `with`, ends the text early, and
        `Stream.generation` is what there is of it. prompt, on_round, settings, errors: as of `generate`.
        """
        check_callbacks(on_round=on_round)
        make_task = TaskMaker(self, settings)
        request, events = self._request(make_task(Job(prompt), 0, 0)), deque[Event]()
        batch = self._batch(1, [lambda _, new: events.extend(new)], on_round)

        def run() -> Iterator[None]:
            rounds = batch.rounds([request])
            while True:
                with torch.inference_mode(), running(self._all_models):  # not while the caller has the turn
                    if next(rounds, None) is None:
                        return
                yield

        def finish() -> Generation:
            interrupted = not request.finished
            request.finish()
            return _generation(request, interrupted)

        return Stream(run(), events, finish)

    def generate_many(
        self,
        prompts: Iterable[Any],
        *,
        batch_size: int = 8,
        samples: int = 1,
        exact: bool = False,
        on_tokens: Callable[[int, int, list[Event]], None] | None = None,
        on_round: Callable[[Round], None] | None = None,
        on_error: Callable[[int, int, Exception], None] | None = None,
        **settings: Unpack[Settings],
    ) -> Iterator[Generation]:
        """Generate from many prompts, `batch_size` at a time; yields each text as it is finished, with its index.

        Requests accept different numbers of drafts, end at different times and leave, and the next prompts take their
        places, so the prompts may be a generator without an end. Nothing of a request but the rounding of its logits
        depends on the batch around it: in float32 its text is nearly always that of `generate` with its seed, in
        bfloat16 often another one of the same distribution after some tokens. With `exact`, it is that in any batch.
        Models that cannot read texts of different lengths together are always read so.

        prompts: each as for `generate`, or a Job with settings of its own. samples: texts of each prompt.
        exact: one forward for each request, so that none is rounded otherwise than alone; a batch saves no time. Of
            two bf16 models of 4 layers and width 256, on one thread, a batch of 8 took 4.5 times as long.
        on_tokens: called after each round with a prompt's number, the sample and the events of its tokens.
        on_round: called then too, with all that is known of the round.
        on_error: called with a prompt's number, the sample and what was raised, where one text fails: by a setting of
            its Job, a constraint, a logits processor, or where no token can be drawn. There is no Generation of it, and
            all others go on. None: texts under way are finished and yielded, no others begin, and then it is raised.
        settings: of every text, see `Settings`.
        Raises as `generate`; what a model or memory fails at ends all of them at once, and KeyboardInterrupt passes
        through, after all finished texts have been yielded.
        """
        check_many(prompts, batch_size, samples, exact)
        check_callbacks(on_tokens=on_tokens, on_round=on_round, on_error=on_error)
        make_task = TaskMaker(self, settings)

        def report(request: Request, events: list[Event]) -> None:
            assert on_tokens is not None
            on_tokens(request.task.index, request.task.sample, events)

        batch = self._batch(batch_size, [] if on_tokens is None else [report], on_round, exact, on_error)
        return self._generate_many(self._requests(prompts, samples, make_task, on_error), batch)

    def _requests(
        self,
        prompts: Iterable[Any],
        samples: int,
        make_task: TaskMaker,
        on_error: Callable[[int, int, Exception], None] | None,
    ) -> Iterator[Request]:
        for index, prompt in enumerate(prompts):
            job = prompt if isinstance(prompt, Job) else Job(prompt)
            for sample in range(samples):
                try:
                    request = self._request(make_task(job, index, sample))
                except ValueError as error:
                    if on_error is None:
                        raise
                    on_error(index, sample, error)
                else:
                    yield request

    def _generate_many(self, requests: Iterable[Request], batch: Batch) -> Iterator[Generation]:
        finished = batch.run(requests)
        while True:
            with torch.inference_mode(), running(self._all_models):  # not while the caller has the turn
                request = next(finished, None)
            if request is None:
                return
            yield _generation(request, interrupted=False)

    @property
    def uses_trees(self) -> bool:
        """Whether drafts are trees."""
        return self.plan.tree is not None

    @property
    def end_of_sequence(self) -> set[int]:
        """The ids that end a text, by the members' generation settings and the tokenizer."""
        ids: set[int] = set().union(*(model.end_tokens for model in self.models))
        own = getattr(self.tokenizer, "eos_token_id", None)
        return ids if own is None else ids | {own}

    @property
    def _all_models(self) -> list[Engine]:
        """Those of the members and of the drafter."""
        return [*self.models, *(model for own in self._outside for model in own.models)]

    def _request(self, task: Task) -> Request:
        num_outside = max([-own.proposer for own in self._outside], default=1)
        return Request(task, self.tokenizer, min(model.vocab_size for model in self.models), num_outside)

    @property
    def _outside(self) -> Sequence[Drafter]:
        """The drafters that are no members."""
        return () if isinstance(self.plan.drafter, int) else self.plan.drafter.parts

    def _batch(
        self,
        size: int,
        reports: list[Report],
        on_round: Callable[[Round], None] | None,
        exact: bool = False,
        on_error: Callable[[int, int, Exception], None] | None = None,
    ) -> Batch:
        """A batch with caches of its own. reports: called after each round with a request and its new events."""
        if on_round is not None:
            reports = [*reports, Tracer(on_round, self.tokenizer).note]

        def report(request: Request, events: list[Event]) -> None:
            for each in reports:
                each(request, events)

        groups = self._groups()
        scorers = [self._scorer(index, self.models[own[0]], own, own, size, exact) for index, own in enumerate(groups)]
        drafters = [own for own in self._outside if self.schedule.speculates and own.model is not None]
        outside = [
            self._scorer(index, own.model, [own.proposer], [own.prompt_of], size, exact)  # type: ignore[arg-type]
            for index, own in enumerate(drafters, len(groups))
        ]
        note_error = None if on_error is None else lambda task, error: on_error(task.index, task.sample, error)
        return Batch(self.schedule(self.plan), scorers, size, report if reports else None, outside, note_error)

    def _scorer(
        self, index: int, model: Engine, indices: Sequence[int], prompts_of: Sequence[int], size: int, exact: bool
    ) -> Scorer:
        needs = self._needs(size * len(indices))
        return Scorer(index, model, indices, prompts_of=prompts_of, needs=needs, exact=exact)

    def _needs(self, num_texts: int) -> Needs:
        return Needs(num_texts, rollback=self.schedule.speculates, trees=self.uses_trees)

    def _groups(self) -> list[list[int]]:
        """The indices that are scored by the same forwards: those of members that share weights."""
        drafter = self.plan.drafter if isinstance(self.plan.drafter, int) else None
        return indices_read_together(self.schedule_name, group_by_weights(self.models), drafter, self.uses_trees)


def _generation(request: Request, interrupted: bool) -> Generation:
    return Generation(
        text="".join(event.text for event in request.events),
        tokens=[event.token for event in request.events],
        logprobs=[event.logprob for event in request.events] if request.task.logprobs else None,
        events=request.events,
        statistics=request.statistics,
        finish_reason="interrupted" if interrupted else "stop" if request.stopped else "length",
        seed=request.task.seed,
        index=request.task.index,
        sample=request.task.sample,
    )
