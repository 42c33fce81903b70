"""What an actor does: it holds an engine, and for each context of its owner one of the engine's."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from specens.engines.protocol import Context, Engine, Needs, Read, Text

Change = tuple[str, int, Any]  # a method of `Text`, the text's number, the argument; or "add" and "remove"


@dataclass(frozen=True)
class RemoteRead:
    """A `Read` of a text by its number."""

    text: int
    sequence: tuple[int, ...]
    num_rows: int


@dataclass(frozen=True)
class Answer:
    """Logits of each read, and the forwards that they took: the texts, their new tokens, seconds."""

    logits: list[Tensor]
    forwards: list[tuple[list[int], list[int], float]]


class Worker:
    """The actor. life: of this process; an actor that Ray has started again has another, and holds nothing."""

    def __init__(self, load: Callable[[], Engine]) -> None:
        self._load = load
        self.life = uuid.uuid4().hex
        self._contexts: dict[int, tuple[Context, dict[int, Text]]] = {}
        self._last: dict[int, tuple[int, Answer]] = {}  # of each context, the turn and its answer

    @cached_property
    def engine(self) -> Engine:
        """Loaded when it is asked for: what a call raises comes to its owner, an error in making an actor ends it."""
        return self._load()

    def facts(self) -> dict[str, Any]:
        """What an engine says of itself, and which life this is."""
        own = self.engine
        facts = {name: getattr(own, name) for name in ("vocab_size", "max_length", "end_tokens", "generation_config")}
        return facts | {"life": self.life, "process": os.getpid()}

    def check(self, needs: Needs) -> None:
        """As the engine's."""
        self.engine.check(needs)

    def check_length(self, num_tokens: int) -> None:
        """As the engine's."""
        self.engine.check_length(num_tokens)

    def read(
        self,
        life: str,
        context: int,
        turn: int,
        needs: Needs,
        changes: Sequence[Change],
        reads: Sequence[RemoteRead],
    ) -> Answer | None:
        """Change texts of a context in this order, then read. None, and nothing done, where this is another life.

        A turn that is asked for again, as its answer was lost, is not done again.
        """
        if life != self.life:
            return None
        done, answer = self._last.get(context, (-1, None))
        if done != turn:
            try:
                if context not in self._contexts:
                    self._contexts[context] = self.engine.open(needs), {}
                self._change(*self._contexts[context], changes)
                answer = self._read(*self._contexts[context], reads)
            except BaseException:
                self._contexts.pop(context, None)  # half changed; its owner tells all of it anew
                raise
            self._last[context] = turn, answer
        return answer

    def _change(self, own: Context, texts: dict[int, Text], changes: Sequence[Change]) -> None:
        for name, number, argument in changes:
            if name == "add":
                texts[number] = own.add(argument)
            elif name == "remove":
                own.remove(texts.pop(number))
            else:
                getattr(texts[number], name)(argument)

    def _read(self, own: Context, texts: dict[int, Text], reads: Sequence[RemoteRead]) -> Answer:
        with self.engine.running():
            logits = own.read([Read(texts[each.text], each.sequence, each.num_rows) for each in reads])
        numbers = {id(text): number for number, text in texts.items()}
        forwards = [
            ([numbers[id(text)] for text in each.texts], list(each.num_tokens), each.seconds) for each in own.forwards
        ]
        return Answer([rows.detach().cpu() for rows in logits], forwards)

    def close(self, life: str, context: int) -> None:
        """Forget a context."""
        if life == self.life:
            self._contexts.pop(context, None)
            self._last.pop(context, None)
