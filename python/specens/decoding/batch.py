"""The requests that generate together, each at its own pace."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from specens.decoding.request import Event, Request, RequestError, Task
from specens.decoding.scorer import Scorer


class Schedule(Protocol):
    """Who forwards what when. speculates: whether drafts are tested, so that members must forget rejected ones."""

    speculates: bool

    def run_round(self, batch: Batch) -> None:
        """Propose, score, verify and commit, for all requests of the batch or for some of them."""
        ...


class Batch:
    """Runs rounds of a schedule until every request is finished; new ones take the places of those that leave.

    scorers: one for each set of weights. outside: those of drafters that are no members. on_tokens: called after each
    round with a request and its new events. on_error: called with the task of a request that fails and what was raised,
    while the others go on; None: those under way are finished, no others begin, and then it is raised.
    """

    def __init__(
        self,
        schedule: Schedule,
        scorers: Sequence[Scorer],
        size: int,
        on_tokens: Callable[[Request, list[Event]], None] | None = None,
        outside: Sequence[Scorer] = (),
        on_error: Callable[[Task, Exception], None] | None = None,
    ) -> None:
        self.requests: list[Request] = []
        self._on_error = on_error
        self._error: Exception | None = None
        self.scorers = scorers
        self._schedule = schedule
        self._size = size
        self._on_tokens = on_tokens
        self._all_scorers = [*scorers, *outside]
        self._scorer_of = {index: scorer for scorer in self._all_scorers for index in scorer.indices}
        self._mark = 0.0

    def scorer_of(self, index: int) -> Scorer:
        """The scorer that serves a place in the ensemble, or an outside drafter."""
        return self._scorer_of[index]

    def run(self, requests: Iterable[Request]) -> Iterator[Request]:
        """Yield each request when it is finished."""
        for finished in self.rounds(requests):
            yield from finished

    def rounds(self, requests: Iterable[Request]) -> Iterator[list[Request]]:
        """Yield after each round the requests that are finished."""
        waiting = iter(requests)
        while self._admit(waiting):
            done: list[Request] = []
            try:
                done = [request for request in self.requests if request.finished]
                if not done:
                    self._run_round()
            except RequestError as failure:
                self._fail(failure)
            for request in done:
                self._release(request)
            yield done
        if self._error is not None:
            raise self._error

    def _admit(self, waiting: Iterator[Request]) -> bool:
        """Fill free places; whether there is any request. What fails to become one is as one that fails."""
        while len(self.requests) < self._size and self._error is None:
            try:
                request = next(waiting, None)
            except Exception as error:  # noqa: BLE001
                self._error = error
                break
            if request is None:
                break
            for scorer in self._all_scorers:
                scorer.admit(request)
            self.requests.append(request)
        return bool(self.requests)

    def _fail(self, failure: RequestError) -> None:
        """Let a request go in the middle of a round, which others begin anew; by their seeds they draft as before."""
        self._release(failure.request)
        if self._on_error is not None:
            self._on_error(failure.request.task, failure.error)
        elif self._error is None:
            self._error = failure.error
        for request in self.requests:
            request.drop_drafts()
            for scorer in self._all_scorers:
                scorer.release(request)
            for scorer in self._all_scorers:
                scorer.admit(request)
        self._report()

    def _release(self, request: Request) -> None:
        request.finish()
        self.requests.remove(request)
        for scorer in self._all_scorers:
            scorer.release(request)

    def _run_round(self) -> None:
        self._mark = time.perf_counter()
        self._schedule.run_round(self)
        self._report()

    def _report(self) -> None:
        if self._on_tokens is None:
            return
        for request in self.requests:
            events = request.take_new_events()
            if events:
                self._on_tokens(request, events)

    def end_phase(self, name: str, requests: Sequence[Request]) -> None:
        """Book the time since the last one under `propose`, `score` or `verify`, in equal parts for these requests."""
        now = time.perf_counter()
        name, part = f"{name}_seconds", (now - self._mark) / (len(requests) or 1)
        for request in requests:
            request.statistics.__dict__[name] += part
        self._mark = now
