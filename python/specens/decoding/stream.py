"""A text that is generated as its tokens are asked for."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from specens.decoding.request import Event

if TYPE_CHECKING:
    from specens.generate import Generation


class Stream:
    """The events of one text, for `for` and for `async for`; a round runs when all tokens of the last one are taken.

    `async for` runs rounds in a thread, so that the loop goes on beside them. One consumer at a time.
    """

    def __init__(self, rounds: Iterator[None], events: deque[Event], finish: Callable[[], Generation]) -> None:
        """rounds: runs one each time it is asked, which adds to `events`. finish: makes what there is a Generation."""
        self._rounds, self._events, self._finish = rounds, events, finish
        self._generation: Generation | None = None

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Event:
        while not self._events:
            if self._generation is not None:
                raise StopIteration
            if next(self._rounds, self) is self:
                self.close()
        return self._events.popleft()

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Event:
        event = await asyncio.to_thread(next, self, None)
        if event is None:
            raise StopAsyncIteration
        return event

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the text where it is; tokens that a round has settled can still be taken."""
        if self._generation is None:
            self._generation = self._finish()

    @property
    def generation(self) -> Generation:
        """The text as a Generation, "interrupted" where it was closed early. Raises RuntimeError before its end."""
        if self._generation is None:
            raise RuntimeError("stream: expected its end, or close(), before generation is asked for")
        return self._generation
