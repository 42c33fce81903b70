"""The requests that generate together, each at its own pace."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from specens.decoding.request import Event, Request
from specens.decoding.scorer import Scorer


class Schedule(Protocol):
    """Who forwards what when. speculates: whether drafts are tested, so that members must forget rejected ones."""

    speculates: bool

    def run_round(self, batch: Batch) -> None:
        """Propose, score, verify and commit, for all requests of the batch or for some of them."""
        ...


class Batch:
    """Runs rounds of a schedule until every request is finished; new ones take the places of those that leave.

    scorers: one for each set of weights. outside: that of a drafter that is no member. on_tokens: called after each
    round with a request and its new events.
    """

    def __init__(
        self,
        schedule: Schedule,
        scorers: Sequence[Scorer],
        size: int,
        on_tokens: Callable[[Request, list[Event]], None] | None = None,
        outside: Scorer | None = None,
    ) -> None:
        self.requests: list[Request] = []
        self.scorers = scorers
        self._schedule = schedule
        self._size = size
        self._on_tokens = on_tokens
        self._all_scorers = [*scorers, *filter(None, [outside])]
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
            done = [request for request in self.requests if request.finished]
            for request in done:
                self._release(request)
            if not done:
                self._run_round()
            yield done

    def _admit(self, waiting: Iterator[Request]) -> bool:
        """Fill free places; whether there is any request."""
        while len(self.requests) < self._size:
            request = next(waiting, None)
            if request is None:
                break
            for scorer in self._all_scorers:
                scorer.admit(request)
            self.requests.append(request)
        return bool(self.requests)

    def _release(self, request: Request) -> None:
        request.finish()
        self.requests.remove(request)
        for scorer in self._all_scorers:
            scorer.release(request)

    def _run_round(self) -> None:
        self._mark = time.perf_counter()
        self._schedule.run_round(self)
        for request in self.requests:
            events = request.take_new_events()
            if events and self._on_tokens is not None:
                self._on_tokens(request, events)

    def end_phase(self, name: str, requests: Sequence[Request]) -> None:
        """Book the time since the last one under `propose`, `score` or `verify`, in equal parts for these requests."""
        now = time.perf_counter()
        for request in requests:
            request.statistics.add_seconds(name, (now - self._mark) / len(requests))
        self._mark = now
