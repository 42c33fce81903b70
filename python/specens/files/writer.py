"""What an actor of `Workers` does: it holds an ensemble, and writes the texts that it is given."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from specens.decoding.trace import Round
from specens.settings.jobs import Job

if TYPE_CHECKING:
    from specens.generate import Generation, SpeculativeEnsemble

Found = TypeVar("Found")


@dataclass(frozen=True)
class Finished:
    """A text by the number of its piece, or why there is none, and its rounds where they are asked for."""

    number: int
    text: Generation | Exception
    rounds: list[Round]


class Writer:
    """The actor. make: the ensemble, when something is asked of it first: what it raises comes to the owner."""

    def __init__(self, make: Callable[[], SpeculativeEnsemble]) -> None:
        self._make, self._lock = make, threading.Lock()
        self._given: SimpleQueue[tuple[int, Job] | None] = SimpleQueue()

    @cached_property
    def _ensemble(self) -> SpeculativeEnsemble:
        return self._make()

    def ask(self, function: Callable[[SpeculativeEnsemble], Found]) -> Found:
        """What a function says of the ensemble."""
        with self._lock:
            return function(self._ensemble)

    def give(self, jobs: list[tuple[int, Job] | None]) -> None:
        """More texts to write, by their numbers; None after the last one."""
        for job in jobs:
            self._given.put(job)

    def write(self, call: dict[str, Any], traced: bool) -> Iterator[Finished | None]:
        """First None, when it is ready to be given jobs, then each text as soon as it is finished.

        A thread writes, so that a text that fails is told while there is no other to write.
        """
        self.ask(bool)
        self._given = SimpleQueue()
        yield None
        told: SimpleQueue[Finished | Exception | None] = SimpleQueue()
        threading.Thread(target=self._write, args=(call, traced, told.put), daemon=True).start()
        while (one := told.get()) is not None:
            if isinstance(one, Exception):
                raise one
            yield one

    def _write(self, call: dict[str, Any], traced: bool, tell: Callable[[Finished | Exception | None], None]) -> None:
        numbers: list[int] = []
        known: set[int] = set()  # Ray calls again what was not answered
        rounds: dict[int, list[Round]] = {}

        def jobs() -> Iterator[Job]:
            while (given := self._given.get()) is not None:
                number, job = given
                if number not in known:
                    known.add(number)
                    numbers.append(number)
                    yield job

        def finish(index: int, text: Generation | Exception) -> None:
            tell(Finished(numbers[index], text, rounds.pop(index, [])))

        def fail(index: int, _: int, error: Exception) -> None:
            # As one that every process can read: an error of another library may not be made again elsewhere.
            is_wrong = isinstance(error, ValueError)
            finish(index, ValueError(str(error)) if is_wrong else RuntimeError(f"{type(error).__name__}: {error}"))

        def note(of_text: Round) -> None:
            rounds.setdefault(of_text.index, []).append(of_text)

        try:
            for text in self._ensemble.generate_many(jobs(), on_error=fail, on_round=note if traced else None, **call):
                finish(text.index, text)
            tell(None)
        except Exception as error:  # noqa: BLE001
            tell(error)
