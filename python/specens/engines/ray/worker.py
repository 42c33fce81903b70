"""What an actor does: it holds an engine, and for each context of its owner one of the engine's."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from specens.decoding.reader import Reader
from specens.decoding.reads import Ask, read_together
from specens.decoding.statistics import Statistics
from specens.engines.protocol import Context, Engine, Needs

Change = tuple[str, int, tuple[Any, ...]]  # a method of `Reader`, the text's number, arguments; or "add"


@dataclass(frozen=True)
class RemoteRead:
    """A `Read` of a text by its number."""

    text: int
    sequence: list[int]
    num_rows: int
    nodes: list[int]
    parents: list[int]


@dataclass(frozen=True)
class Answer:
    """Logits of each read, and the forwards that they took: the texts, their new tokens, seconds."""

    logits: list[Tensor]
    forwards: list[tuple[list[int], list[int], float]]


class Worker:
    """The actor. Trees are read as in one process: in one forward where the engine holds them, else path by path."""

    def __init__(self, load: Callable[[], Engine]) -> None:
        self._load = load
        self._contexts: dict[int, _Texts] = {}

    @cached_property
    def engine(self) -> Engine:
        """Loaded when it is asked for: what a call raises comes to its owner, an error in making an actor ends it."""
        return self._load()

    def facts(self) -> dict[str, Any]:
        """What an engine says of itself."""
        own = self.engine
        return {name: getattr(own, name) for name in ("vocab_size", "max_length", "end_tokens", "generation_config")}

    def process(self) -> int:
        """The number of this process."""
        return os.getpid()

    def check(self, needs: Needs) -> None:
        """As the engine's."""
        self.engine.check(needs)

    def check_length(self, num_tokens: int) -> None:
        """As the engine's."""
        self.engine.check_length(num_tokens)

    def read(self, context: int, needs: Needs, changes: Sequence[Change], reads: Sequence[RemoteRead]) -> Answer:
        """Change texts of a context in this order, then read."""
        try:
            if context not in self._contexts:
                self._contexts[context] = _Texts(self.engine, self.engine.open(needs))
            return self._contexts[context].read(changes, reads)
        except BaseException:
            self._contexts.pop(context, None)  # half changed; its owner tells all of it anew
            raise

    def close(self, context: int) -> None:
        """Forget a context."""
        self._contexts.pop(context, None)


class _Texts:
    """The texts of a context by their numbers."""

    def __init__(self, engine: Engine, own: Context) -> None:
        self._engine, self._own = engine, own
        self._readers: dict[int, _Text] = {}

    @torch.inference_mode()
    def read(self, changes: Sequence[Change], reads: Sequence[RemoteRead]) -> Answer:
        for name, number, arguments in changes:
            if name == "add":
                self._readers[number] = _Text(self._own, self._engine.vocab_size, *arguments)
            else:
                getattr(self._readers[number], name)(*arguments)
            if name == "close":
                del self._readers[number]
        forwards: list[tuple[Mapping[int, int], float]] = []
        readers = [self._readers[each.text] for each in reads]
        for reader in readers:
            reader.forwards = forwards
        asked = [
            Ask(reader, tokens := [*each.sequence, *each.nodes], len(tokens), each.num_rows, each.parents)
            for reader, each in zip(readers, reads, strict=True)
        ]
        with self._engine.running():
            logits = read_together(asked)
        numbers = {id(reader.texts[0]): number for number, reader in self._readers.items()}
        booked = [([numbers[text] for text in new], list(new.values()), seconds) for new, seconds in forwards]
        return Answer([rows.cpu() for (rows,) in logits], booked)


class _Text(Reader):
    """A text there. forwards: of the read under way, the tokens of each of its texts by their identity, and seconds."""

    def __init__(self, context: Context, vocab_size: int, prompt: list[int]) -> None:
        super().__init__(context, vocab_size, [prompt], [0], Statistics.of(1))
        self.forwards: list[tuple[Mapping[int, int], float]] = []

    def count(self, tokens: Mapping[int, int], seconds: float) -> None:
        """Note a forward once for all texts in it."""
        super().count(tokens, seconds)
        if not any(tokens is noted for noted, _ in self.forwards):
            self.forwards.append((tokens, seconds * len(tokens)))
