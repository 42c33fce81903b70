"""What owners of workers do when these are lost, on a Ray of one thread; tests/engines/ray has real processes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from specens.files.workers import Workers
from specens.files.writer import Finished
from specens.settings.jobs import Job

LOSSES = {
    name: type(name, (Exception,), {}) for name in ("RayError", "RayTaskError", "ObjectLostError", "NodeDiedError")
}
LOSSES |= {name: type(name, (LOSSES["RayError"],), {}) for name in ("RayActorError", "OutOfMemoryError")}
NUM_PROMPTS = 11


@dataclass(frozen=True)
class Text:
    prompt: int
    index: int = -1
    sample: int = -1


def remote(function):
    return SimpleNamespace(remote=function, options=lambda **_: SimpleNamespace(remote=function))


class Actor:
    """A worker that writes a text at a time, once it has as many as a batch; deadly prompts end it."""

    lost = 0

    def __init__(self, deadly):
        self.given, self.deadly = deque(), deadly
        self.ask, self.give, self.write = remote(lambda _: None), remote(self.given.extend), remote(self.texts)

    def texts(self, call, traced):  # noqa: ARG002
        self.given.clear()
        yield None
        running, is_last = [], False
        while running or not is_last:
            while len(running) < call["batch_size"] and not is_last:
                assert self.given, "a worker waits for a prompt, or for word that nothing follows"
                one = self.given.popleft()
                running, is_last = (running, True) if one is None else ([*running, one], False)
            if any(self.deadly(job.prompt) for _, job in running):
                Actor.lost += 1
                raise LOSSES["RayActorError"]
            if running:
                number, job = running.pop(0)
                yield Finished(number, Text(job.prompt), [])


@pytest.fixture
def workers(monkeypatch):
    """Makes some, of whose prompts a function says which are deadly."""

    def make(num_workers, deadly):
        ray = SimpleNamespace(
            exceptions=SimpleNamespace(**LOSSES),
            remote=lambda _: SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda _: Actor(deadly))),
            get=lambda value: value,
            kill=lambda _: None,
            wait=lambda streams, **_: (streams[-1:], streams[:-1]),
            is_initialized=lambda: False,
        )
        monkeypatch.setattr("specens.files.workers.start_ray", lambda _: ray)
        monkeypatch.setattr(Actor, "lost", 0)
        return Workers(lambda: None, num_workers)

    return make


def written(workers, batch_size, on_error=None):
    jobs = [Job(prompt) for prompt in range(NUM_PROMPTS)]
    return sorted(text.index for text in workers.generate_many(jobs, batch_size=batch_size, on_error=on_error))


@pytest.mark.parametrize("batch_size", [1, 2, 5])
@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("deadly", [[4], [0, 1, 10]], ids=str)
def test_what_ends_its_worker_twice_is_told_and_all_others_are_written(workers, num_workers, batch_size, deadly):
    errors = {}
    found = written(workers(num_workers, deadly.__contains__), batch_size, lambda *own: errors.update({own[0]: own[2]}))
    assert found == [prompt for prompt in range(NUM_PROMPTS) if prompt not in deadly]
    assert sorted(errors) == deadly
    assert {str(error) for error in errors.values()} == {"a worker was lost with this text, twice (RayActorError)"}
    assert len(deadly) < Actor.lost <= 2 * len(deadly)


def test_without_anyone_to_tell_it_is_raised(workers):
    with pytest.raises(RuntimeError, match="a worker was lost with this text, twice"):
        written(workers(2, [4].__contains__), 2)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_one_that_is_lost_once_for_another_reason_loses_nothing(workers, batch_size):
    assert written(workers(2, lambda prompt: prompt == 6 and Actor.lost == 0), batch_size) == list(range(NUM_PROMPTS))
    assert Actor.lost == 1
