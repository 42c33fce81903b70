"""Members in Ray actors: the texts of members in this process, read at the same time, also when an actor is lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import ray
import torch
from driver.tiny_models import tiny_llama
from specens import SpeculativeEnsemble
from specens.engines.protocol import Needs, Read
from specens.engines.ray import RayEngine
from specens.engines.transformers.causal_lm import CausalLM

from specens_kernels import Sampling

TESTS = Path(__file__).parents[2]
PROMPTS = [[1, 2, 3, 1, 2], [4], [7, 8, 9]]
JOB = {"max_new_tokens": 12, "sampling": Sampling(temperature=0.0)}


class Tiny:
    """Makes a small model where the actor is."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(self) -> CausalLM:
        torch.set_num_threads(1)
        return CausalLM(tiny_llama(self.seed))


@pytest.fixture(scope="module")
def actors():
    os.environ["PYTHONPATH"] = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])  # of the actors, too
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield [RayEngine(Tiny(seed)) for seed in (0, 1)]
    ray.shutdown()


@pytest.fixture(scope="module")
def expected():
    members = [Tiny(seed)() for seed in (0, 1)]
    return [SpeculativeEnsemble(members, schedule="standard").generate(prompt, **JOB).tokens for prompt in PROMPTS]


@pytest.mark.parametrize(
    "schedule",
    [{"schedule": "standard"}, {"schedule": "alternate"}, {"schedule": "parallel", "draft_lens": 3}, {"tree": (2, 2)}],
    ids=str,
)
def test_every_schedule_writes_the_texts_of_members_in_this_process(actors, expected, schedule):
    ensemble = SpeculativeEnsemble(actors, **schedule)
    assert ensemble.generate(PROMPTS[0], **JOB).tokens == expected[0]
    texts = sorted(ensemble.generate_many(PROMPTS, batch_size=2, **JOB), key=lambda text: text.index)
    assert [text.tokens for text in texts] == expected
    assert sum(texts[0].statistics.forwards) > 0


def test_an_actor_that_is_killed_is_started_again_and_the_texts_are_the_same(actors, expected):
    ensemble = SpeculativeEnsemble(actors, schedule="alternate")
    before, pieces = actors[1].process, []
    killed = False

    def kill_once(*_):
        nonlocal killed
        pieces.append(1)
        if not killed and len(pieces) == 4:
            killed = True
            os.kill(actors[1].process, signal.SIGKILL)

    text = ensemble.generate(PROMPTS[0], on_tokens=kill_once, **JOB)
    assert killed
    assert text.tokens == expected[0]
    assert actors[1].process != before


def test_what_an_engine_refuses_there_is_refused_here(actors):
    with pytest.raises(ValueError, match=r"prompt|token"):
        SpeculativeEnsemble(actors, schedule="standard").generate([10**6], **JOB)


def test_a_context_is_whole_after_a_read_that_raised(actors):
    context, plain = actors[0].open(Needs(2)), Tiny(0)().open(Needs(2))
    text, other = context.add([1, 2]), plain.add([1, 2])
    (first,) = context.read([Read(text, [])])
    gone = context.add([5])
    with pytest.raises(Exception, match=r"out of range"):
        context.read([Read(text, [10**6])])
    context.remove(gone)
    text.roll_back(0)
    (again,) = context.read([Read(text, [3])])
    assert torch.equal(first, plain.read([Read(other, [])])[0])
    torch.testing.assert_close(again, plain.read([Read(other, [3])])[0])


class Small(CausalLM):
    def check_length(self, num_tokens):
        if num_tokens > 10:
            raise ValueError(f"cache: expected at most 10 tokens, got {num_tokens}")


def test_the_room_of_an_engine_there_is_asked_about(actors):  # noqa: ARG001
    engine = RayEngine(lambda: Small(tiny_llama(0)))
    engine.check_length(10)
    with pytest.raises(ValueError, match="cache: expected at most 10 tokens, got 11"):
        engine.check_length(11)


def refuse():
    raise ValueError("model: expected another")


def test_what_loading_there_refuses_is_a_value_error_here(actors):  # noqa: ARG001
    with pytest.raises(ValueError, match="model: expected another"):
        RayEngine(refuse)


def test_nothing_waits_to_be_told_of_texts_that_were_never_read(actors):
    context = actors[0].open(Needs(2))
    read = context.add([1])
    context.read([Read(read, [])])
    unread = context.add([3])
    unread.roll_back(0)
    context.remove(unread)
    assert context._waiting == []
    context.remove(read)
    assert [name for name, *_ in context._waiting] == ["remove"]
