"""Text from the ensemble of several language models, by speculation among them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from specens.arguments import (
    as_stop_tokens,
    check_caches,
    check_lengths,
    check_task,
    check_trees,
    complete_ensemble,
    group_by_weights,
    load_members,
    make_plan,
    with_weight_of_drafter,
)
from specens.member import Member
from specens.prompts import prompts_for_members
from specens.request import Ensemble, Event, Request, Task
from specens.schedules import SCHEDULES, Tree, TreePlan
from specens.statistics import Statistics
from specens.text_stream import TextStream
from specens_kernels import Sampling


@dataclass
class Generation:
    """A generated text.

    tokens: all emitted ids, the end of sequence included. text: of the tokens, without special tokens; the joined texts
        of the events. logprobs: under the target distribution, one a token, or None unless asked for.
    finish_reason: "stop" (end of sequence), "length" (max_new_tokens) or "interrupted". seed: reproduces the text.
    """

    text: str
    tokens: list[int]
    logprobs: list[float | None] | None
    events: list[Event]
    statistics: Statistics
    finish_reason: str
    seed: int

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended it early."""
        return self.finish_reason == "interrupted"

    def to_dict(self) -> dict:
        """Everything as plain values for JSON."""
        return {
            "text": self.text,
            "tokens": self.tokens,
            "logprobs": self.logprobs,
            "finish_reason": self.finish_reason,
            "interrupted": self.interrupted,
            "seed": self.seed,
            "statistics": self.statistics.to_dict(),
            "events": [event.to_dict() for event in self.events],
        }


class SpeculativeEnsemble:
    """An ensemble of Hugging Face causal language models with one tokenizer.

    members: loaded models, or model specs (see `specens.adapters.load.resolve_model`); equal specs are loaded once.
        A model that should have another cache than a DynamicCache comes in a `specens.adapters.causal_lm.CausalLM`.
    tokenizer: of all members; None takes the one of the first spec. Without one, prompts and results are token ids.
    ensemble: Mixture, LogitMixture or Contrastive; None is the lone member, or the equal-weight Mixture of several.
        A member of weight 0 only drafts: Mixture((1, 0)) is the speculative decoding of member 0.
    draft_lens: how many tokens a member drafts in a row; one number, or one for each member.
    schedule: "standard", "fixed" (member `drafter` drafts), "alternate" (two members draft for each other) or "tree"
        (member `drafter` drafts trees).
    tree: the trees of the schedule "tree": the number of children on each level, such as (4, 2, 2), or a TreePlan.
    dtype, device: for members given as specs.
    Raises ValueError where an argument is wrong, where tokenizers differ, or where a member's cache cannot be rolled
        back as its schedule needs.
    """

    def __init__(
        self,
        members: Sequence[Any],
        tokenizer: Any | None = None,
        ensemble: Ensemble | None = None,
        draft_lens: int | Sequence[int] = 1,
        schedule: str = "alternate",
        *,
        drafter: int = 0,
        tree: TreePlan | Sequence[int] | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: str | torch.device = "cpu",
    ) -> None:
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule: expected one of {', '.join(SCHEDULES)}; got {schedule!r}")
        plan = make_plan(members, draft_lens, drafter, tree)
        self.schedule_name = schedule
        self.schedule = SCHEDULES[schedule]
        self.schedule(plan)  # raises where the plan does not suit it
        self.ensemble = complete_ensemble(ensemble, plan.num_members)
        self.plan = with_weight_of_drafter(plan, self.ensemble)
        self.models, self.tokenizer = load_members(members, tokenizer, dtype, device)
        fresh = self._members([[0]] * plan.num_members, Statistics.of(plan.num_members))
        if self.uses_trees:
            check_trees(self.models, fresh, plan.tree)

    def generate(
        self,
        prompt: Any,
        *,
        max_new_tokens: int = 256,
        sampling: Sampling | None = None,
        seed: int | None = None,
        chat: bool = False,
        stop_tokens: Sequence[int] | None = None,
        logprobs: bool = False,
        on_tokens: Callable[[list[Event]], None] | None = None,
    ) -> Generation:
        """Generate from one prompt for all members, or a list with one for each. Batch 1.

        prompt: text, token ids or chat messages; chat: put text through the chat template.
        sampling: temperature 1 by default. seed: of the text's randomness, None draws one.
        stop_tokens: ids that end the text, None takes the end of sequence of models and tokenizer; () never stops.
        on_tokens: called after each round with the events of its tokens, to stream them.
        KeyboardInterrupt ends the generation and returns what was settled, with `interrupted` True.
        Raises ValueError where an argument is wrong; RuntimeError where no token has positive probability.
        """
        prompts = prompts_for_members(prompt, self.plan.num_members, self.tokenizer, chat)
        task = Task(
            ensemble=self.ensemble,
            sampling=Sampling() if sampling is None else sampling,
            seed=secrets.randbits(63) if seed is None else seed,
            max_new_tokens=max_new_tokens,
            stop_tokens=frozenset(self.end_of_sequence) if stop_tokens is None else as_stop_tokens(stop_tokens),
            logprobs=logprobs,
        )
        check_task(task)
        check_lengths(self.models, prompts, max_new_tokens)
        statistics = Statistics.of(self.plan.num_members)
        members = self._members(prompts, statistics)
        check_caches(members, prompts, max_new_tokens, self.plan.tree.most_nodes if self.uses_trees else 0)
        request = Request(members, task, statistics, TextStream(self.tokenizer))
        interrupted = self._run(request, on_tokens)
        return _generation(request, interrupted)

    @property
    def uses_trees(self) -> bool:
        """Whether the schedule is "tree"."""
        return self.schedule is Tree

    @property
    def end_of_sequence(self) -> set[int]:
        """The ids that end a text, by the members' generation settings and the tokenizer."""
        ids = set().union(*(model.end_of_sequence for model in self.models))
        own = getattr(self.tokenizer, "eos_token_id", None)
        return ids if own is None else ids | {own}

    @torch.inference_mode()
    def _run(self, request: Request, on_tokens: Callable[[list[Event]], None] | None) -> bool:
        """Run rounds to the end; True if it was interrupted."""
        schedule = self.schedule(self.plan)
        started = time.perf_counter()
        request.statistics.start_clock()
        try:
            while not request.finished:
                schedule.run_round(request)
                request.statistics.rounds += 1
                if on_tokens is not None:
                    on_tokens(request.take_new_events())
                    request.statistics.start_clock()
        except KeyboardInterrupt:
            return True
        finally:
            request.statistics.seconds = time.perf_counter() - started
        return False

    def _members(self, prompts: list[list[int]], statistics: Statistics) -> list[Member]:
        """Members with fresh caches; where nothing is rolled back, those that share weights are one."""
        speculates = self.schedule.speculates
        groups = [[index] for index in range(len(self.models))] if speculates else group_by_weights(self.models)
        return [
            Member(self.models[group[0]], [prompts[index] for index in group], group, statistics, speculates)
            for group in groups
        ]


def _generation(request: Request, interrupted: bool) -> Generation:
    tokens = [event.token for event in request.events]
    request.statistics.emitted = len(tokens)
    stopped = bool(tokens) and request.ends_at(tokens[-1])
    return Generation(
        text="".join(event.text for event in request.events),
        tokens=tokens,
        logprobs=[event.logprob for event in request.events] if request.task.logprobs else None,
        events=request.events,
        statistics=request.statistics,
        finish_reason="interrupted" if interrupted else "stop" if stopped else "length",
        seed=request.task.seed,
    )
