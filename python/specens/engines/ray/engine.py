"""An engine in a Ray actor: token ids go in, the rows that are needed come out, all else stays there."""

from __future__ import annotations

import itertools
import logging
import math
import os
import socket
import weakref
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from specens.engines.protocol import Context, Engine, Forward, Needs, Read, Text
from specens.engines.ray.worker import Answer, Change, RemoteRead, Worker

logger = logging.getLogger(__name__)
LIVES = 5  # that a member may have before its loss ends a generation
PLACEMENT_TIMEOUT = 300.0  # seconds, in which a busy machine or one that joins the cluster also starts a process


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
            check_cluster(address)
            ray.init(log_to_driver=False, **own)
        except OSError as error:
            raise ValueError(f"{argument}: expected a Ray cluster at {address}, found none: {error}") from None
    return ray


def check_cluster(address: str | None) -> None:
    """Raise OSError where nobody listens at HOST:PORT: Ray itself tries for minutes."""
    host, _, port = (address or "").rpartition(":")
    if host and port.isdigit() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


class RayEngine(Engine):
    """A member in an actor of its own, on this machine or another of a Ray cluster.

    load: makes its engine there, or a model spec, whose files are found there. dtype, device, revision,
        model_kwargs: of a spec.
    options: of the actor, as Ray takes them (num_cpus, num_gpus, resources, ...). placement_timeout: seconds in which
        the actor has to be given them, also where it is started again.
    Ray is started, or joined where its variable RAY_ADDRESS says so, unless it is already. An actor that is lost is
    started again, until it has been lost five times in a row, and what it held is read again from the texts.
    Raises ValueError where options are none of Ray's, or the cluster has no place for the actor, and as `load`.
    """

    name, runs_elsewhere = "ray", True

    def __init__(
        self,
        load: Callable[[], Engine] | str,
        *,
        dtype: str | torch.dtype | None = None,
        device: str | None = None,
        revision: str | None = None,
        model_kwargs: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
        placement_timeout: float = PLACEMENT_TIMEOUT,
    ) -> None:
        self._ray = start_ray()
        if isinstance(load, str):
            given = {"dtype": dtype, "device": device, "revision": revision, "model_kwargs": model_kwargs}
            load = SpecLoader(load, **given)
        self._options, self._timeout = options or {}, placement_timeout
        self._actors, self._load = actors_with(self._options), load
        if not isinstance(placement_timeout, int | float) or placement_timeout <= 0:
            raise ValueError(f"placement_timeout: expected seconds > 0, got {placement_timeout!r}")
        self._actor: Any = None
        self._starting = Lock()  # members may be read in several threads
        self.contexts = itertools.count()
        self._longest = 0  # of the lengths that it was asked about and has room for
        for name, value in self.call("facts").items():
            setattr(self, name, value)

    @property
    def process(self) -> int:
        """The number of the actor's process, where it is."""
        return self.call("process")

    def call(self, name: str, *arguments: Any) -> Any:
        """What a method of the actor returns; of another actor, where this one is lost meanwhile."""
        return self._call(name, lambda _: arguments)[0]

    def _call(self, name: str, arguments: Callable[[Any], tuple[Any, ...]]) -> tuple[Any, Any]:
        """What a method returns, and of which actor. arguments: for an actor."""
        lost: Exception | None = None
        for _ in range(LIVES):
            actor = self._living()
            try:
                return self._ray.get(getattr(actor, name).remote(*arguments(actor))), actor
            except self._ray.exceptions.RayTaskError as error:
                raise (error.cause if isinstance(error.cause, ValueError) else error) from None
            except self._ray.exceptions.RayActorError as error:
                logger.warning("a member's actor was lost, and is started again; its texts are read anew")
                lost = error
                with self._starting:
                    if self._actor is actor:
                        self._end()
                        self._actor = None
        raise RuntimeError(f"a member's actor was lost again and again: {lost}") from lost

    def _living(self) -> Any:
        """The actor; a new one, where there is none."""
        with self._starting:
            if self._actor is None:
                self._actor = self._started()
                self._end = weakref.finalize(self, _end, self._ray, self._actor)
            return self._actor

    def _started(self) -> Any:
        """A new actor, as soon as it has a place. Ray would have it wait for one for ever."""
        ray = self._ray
        # It reserves no CPU unless told to: of more members than CPUs the last would find no place.
        actor = self._actors.remote(self._load)
        is_ready = actor.__ray_ready__.remote()
        if not ray.wait([is_ready], timeout=self._timeout)[0]:
            ray.kill(actor)
            raise ValueError(
                f"members: expected a place for an actor with {shown(self._options)} within {self._timeout:g} s, got "
                f"none; free are {shown(ray.available_resources())} of {shown(ray.cluster_resources())}"
            )
        try:
            ray.get(is_ready)
        except ray.exceptions.RayError as error:
            raise RuntimeError(f"a member's actor cannot start: {error}") from error
        return actor

    def read(self, context: RayContext, reads: Sequence[RemoteRead]) -> Answer:
        """Bring a context up to date and read; all of it anew in an actor that holds nothing."""
        answer, actor = self._call("read", lambda actor: (context.number, context.needs, context.changes(actor), reads))
        context.is_up_to_date(actor)
        return answer

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
        if self._ray.is_initialized() and self._actor is not None:
            self._actor.close.remote(context)


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
    """A text in the actor, by its number. What is done to it is told with the next read.

    num_tokens: generated ones before the nodes of the last read.
    """

    def __init__(self, context: RayContext, number: int, prompt: list[int]) -> None:
        self.number, self.prompt, self.num_tokens = number, prompt, 0
        self._context = context

    def roll_back(self, length: int) -> None:
        self._context.change("roll_back", self, length)

    def settle(self, length: int) -> None:
        self._context.change("settle", self, length)

    def keep_path(self, path: Sequence[int]) -> None:
        self._context.change("keep_path", self, self.num_tokens, list(path))

    def keep_nodes(self, nodes: Sequence[int]) -> None:
        self._context.change("keep_nodes", self, self.num_tokens, list(nodes))


class RayContext(Context):
    """The texts of a batch in an actor.

    _known_to: the actor that knows of them up to the changes that wait; None where none does, as after a read that
    raised.
    """

    def __init__(self, engine: RayEngine, needs: Needs) -> None:
        self.needs, self.number = needs, next(engine.contexts)
        self._engine, self._numbers = engine, itertools.count()
        self._known_to: Any = None
        self._texts: dict[int, RayText] = {}
        self._waiting: list[Change] = []
        weakref.finalize(self, engine.forget, self.number)

    def add(self, prompt: list[int]) -> RayText:
        text = RayText(self, next(self._numbers), list(prompt))
        self._texts[text.number] = text
        self.change("add", text, text.prompt)
        return text

    def remove(self, text: Text) -> None:
        assert isinstance(text, RayText)
        del self._texts[text.number]
        is_new = any(name == "add" and number == text.number for name, number, _ in self._waiting)
        self._waiting = [change for change in self._waiting if change[1] != text.number]
        if not is_new:  # a member of weight 0 may never be read, and its actor need not hear of its texts
            self.change("close", text)

    def change(self, name: str, text: RayText, *arguments: Any) -> None:
        self._waiting.append((name, text.number, arguments))

    def changes(self, actor: Any) -> list[Change]:
        """What an actor does not know: where it is a new one, the texts themselves."""
        if actor is self._known_to:
            return self._waiting
        return [("add", text.number, (text.prompt,)) for text in self._texts.values()]

    def is_up_to_date(self, actor: Any) -> None:
        self._known_to, self._waiting = actor, []

    def holds_tree(self, text: Text, num_tokens: int) -> bool:  # noqa: ARG002
        """Always: where the engine there does not, the actor reads path by path."""
        return True

    def read(self, reads: Sequence[Read]) -> list[Tensor]:
        """Logits from the actor, on the CPU."""
        asked = []
        for read in reads:
            assert isinstance(read.text, RayText)
            read.text.num_tokens = len(read.sequence)
            own = [list(part) for part in (read.nodes, read.parents)]
            asked.append(RemoteRead(read.text.number, list(read.sequence), read.num_rows, *own))
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


def actors_with(options: Mapping[str, Any], argument: str = "options") -> Any:
    """Actors that may be started with these options of Ray's. Raises ValueError where there are none such."""
    ray = start_ray()
    expected = f"{argument}: expected options of a Ray actor, such as num_gpus, num_cpus or resources"
    if not isinstance(options, Mapping):
        raise ValueError(f"{expected}, by their names; got {options!r}")
    for name in ("max_restarts", "max_task_retries"):
        if name in options:
            raise ValueError(f"{expected}, and no {name}, as its owner starts a lost one again; got {dict(options)}")
    try:
        return ray.remote(Worker).options(**options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{expected}; got {dict(options)}: {error}") from None


def share_of_gpus(num_actors: int) -> float:
    """What each of so many actors may have of the cluster's GPUs: one, or an even part where they are fewer."""
    num_gpus = int(start_ray().cluster_resources().get("GPU", 0))
    return 1 / math.ceil(num_actors / num_gpus) if num_gpus else 0


def options_unless_given(num_actors: int, device: str | torch.device | None) -> dict[str, Any]:
    """Ray's options of each of so many actors where nobody says: its share of the GPUs; none for device "cpu"."""
    if str(device).partition(":")[0] == "cpu":
        return {}
    share = share_of_gpus(num_actors)
    return {"num_gpus": share} if share else {}


def shown(amounts: Mapping[str, Any]) -> str:
    """Resources or options in words, without those that Ray makes for each machine."""
    own = {name: value for name, value in amounts.items() if not name.startswith(("node:", "object_store_memory"))}
    return ", ".join(f"{name} {value}" for name, value in own.items()) or "no resources"
