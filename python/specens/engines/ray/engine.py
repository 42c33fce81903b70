"""An engine in a Ray actor: token ids go in, the rows that are needed come out, all else stays there."""

from __future__ import annotations

import itertools
import logging
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from specens.engines.protocol import Context, Engine, Forward, Needs, Read, Text
from specens.engines.ray.worker import Answer, Change, RemoteRead, Worker

logger = logging.getLogger(__name__)
LIVES = 5  # that a member may have before its loss ends a generation


def start_ray(argument: str = "members") -> Any:
    """Ray, started, or joined where its variable RAY_ADDRESS says so, unless it is already.

    Raises ValueError naming the argument where it is not installed, or there is no cluster at that address.
    """
    try:
        import ray
    except ImportError:
        raise ValueError(f"{argument}: expected Ray for actors; try: pip install 'specens-kernels[ray]'") from None
    if not ray.is_initialized():
        address = os.environ.get("RAY_ADDRESS")
        own: dict[str, Any] = {} if address else {"include_dashboard": False}  # a cluster decides for itself
        try:
            ray.init(log_to_driver=False, **own)
        except ConnectionError as error:
            raise ValueError(f"{argument}: expected a Ray cluster at {address}, found none: {error}") from None
    return ray


class RayEngine(Engine):
    """A member in an actor of its own, on this machine or another of a Ray cluster.

    load: makes its engine there, or a model spec, whose files are found there. dtype, device, revision: of a spec.
    options: of the actor, as Ray takes them (num_cpus, num_gpus, resources, ...).
    Ray is started, or joined where its variable RAY_ADDRESS says so, unless it is already. An actor that is lost is
    started again by Ray, up to four times, and what it held is read again from the texts.
    """

    name, runs_elsewhere = "ray", True

    def __init__(
        self,
        load: Callable[[], Engine] | str,
        *,
        dtype: str | torch.dtype | None = None,
        device: str | None = None,
        revision: str | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        self._ray = start_ray()
        if isinstance(load, str):
            load = SpecLoader(load, dtype=dtype, device=device, revision=revision)
        # Ray calls again what a lost actor did not answer; a new life knows nothing, and says so. It reserves no CPU
        # unless told to: of more members than CPUs the last would wait for ever.
        settings = {"max_restarts": LIVES - 1, "max_task_retries": -1, **(options or {})}
        self._actor = self._ray.remote(Worker).options(**settings).remote(load)
        weakref.finalize(self, _end, self._ray, self._actor)
        self.contexts, self._turns = itertools.count(), itertools.count()
        self._longest = 0  # of the lengths that it was asked about and has room for
        self._learn()

    def _learn(self) -> None:
        """Ask the actor for the engine's facts, and for its life."""
        facts = self.call("facts")
        self.life, self.process = facts.pop("life"), facts.pop("process")
        for name, value in facts.items():
            setattr(self, name, value)

    def call(self, name: str, *arguments: Any) -> Any:
        """What a method of the actor returns; of its next life, where it is lost meanwhile."""
        try:
            return self._ray.get(getattr(self._actor, name).remote(*arguments))
        except self._ray.exceptions.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, ValueError) else error) from None

    def read(self, context: RayContext, reads: Sequence[RemoteRead]) -> Answer:
        """Bring a context up to date and read; all of it anew in an actor that holds nothing."""
        turn = next(self._turns)
        for _ in range(LIVES):
            given = (self.life, context.number, turn, context.needs, context.changes(self.life), reads)
            answer = self.call("read", *given)
            if answer is not None:
                context.is_up_to_date(self.life)
                return answer
            logger.warning("a member's actor was lost, and is started again; its texts are read anew")
            self._learn()
        raise RuntimeError("a member's actor was lost again and again")

    def open(self, needs: Needs) -> RayContext:
        """A context there."""
        self.check(needs)
        return RayContext(self, needs)

    def check(self, needs: Needs) -> None:
        """As the engine's there."""
        self.call("check", needs)

    def check_length(self, num_tokens: int) -> None:
        """As the engine's there, which is asked once about a length."""
        if num_tokens > self._longest:
            self.call("check_length", num_tokens)
            self._longest = num_tokens

    def forget(self, context: int) -> None:
        """Have the actor forget a context, some time."""
        if self._ray.is_initialized():
            self._actor.close.remote(self.life, context)


class SpecLoader:
    """Loads a spec where the actor is."""

    def __init__(self, spec: str, **given: Any) -> None:
        self.spec, self.given = spec, given

    def __call__(self) -> Engine:
        from specens.engines.loading import Loader

        return Loader(**self.given).engine(self.spec)


def _end(ray: Any, actor: Any) -> None:
    if ray.is_initialized():
        ray.kill(actor)


class RayText(Text):
    """A text in the actor, by its number. What is done to it is told with the next read."""

    def __init__(self, context: RayContext, number: int, prompt: list[int]) -> None:
        self.number, self.prompt = number, prompt
        self._context = context

    def roll_back(self, length: int) -> None:
        self._context.change("roll_back", self, length)

    def settle(self, length: int) -> None:
        self._context.change("settle", self, length)

    def keep_path(self, path: Sequence[int]) -> None:
        """Nothing: trees are read path by path, and no node is held."""

    def keep_nodes(self, nodes: Sequence[int]) -> None:
        """Likewise."""


class RayContext(Context):
    """The texts of a batch in an actor.

    life: the one that knows of them up to the changes that wait; None where none does, as after a read that raised.
    """

    def __init__(self, engine: RayEngine, needs: Needs) -> None:
        self.needs, self.number = needs, next(engine.contexts)
        self._engine, self._numbers = engine, itertools.count()
        self._life: str | None = engine.life
        self._texts: dict[int, RayText] = {}
        self._waiting: list[Change] = []
        weakref.finalize(self, engine.forget, self.number)

    def add(self, prompt: list[int]) -> RayText:
        text = RayText(self, next(self._numbers), list(prompt))
        self._texts[text.number] = text
        self._waiting.append(("add", text.number, text.prompt))
        return text

    def remove(self, text: Text) -> None:
        assert isinstance(text, RayText)
        del self._texts[text.number]
        is_new = any(name == "add" and number == text.number for name, number, _ in self._waiting)
        self._waiting = [change for change in self._waiting if change[1] != text.number]
        if not is_new:  # a member of weight 0 may never be read, and its actor need not hear of its texts
            self.change("remove", text, None)

    def change(self, name: str, text: RayText, argument: Any) -> None:
        self._waiting.append((name, text.number, argument))

    def changes(self, life: str) -> list[Change]:
        """What this life of the actor does not know: where it is another, the texts themselves."""
        if life == self._life:
            return self._waiting
        return [("add", text.number, text.prompt) for text in self._texts.values()]

    def is_up_to_date(self, life: str | None) -> None:
        self._life, self._waiting = life, []

    def read(self, reads: Sequence[Read]) -> list[Tensor]:
        """Logits from the actor, on the CPU."""
        texts = [read.text for read in reads]
        assert all(isinstance(text, RayText) and not read.nodes for text, read in zip(texts, reads))
        numbers = [text.number for text in texts if isinstance(text, RayText)]
        asked = [RemoteRead(number, tuple(read.sequence), read.num_rows) for number, read in zip(numbers, reads)]
        try:
            answer = self._engine.read(self, asked)
        except Exception:
            self.is_up_to_date(None)
            raise
        self.forwards = [
            Forward([self._texts[number] for number in own], counts, seconds)
            for own, counts, seconds in answer.forwards
        ]
        return answer.logits
