"""Members in Ray actors: the texts of members in this process, read at the same time, also when an actor is lost."""

from __future__ import annotations

import os
import signal
from functools import partial

import pytest
import ray
import torch
from driver.strict_engine import StrictEngine, by_prompt
from driver.tiny_models import relative_of, save_pair, tiny_llama
from specens import SpeculativeEnsemble, TreePlan
from specens.engines.loading import options_of_actors
from specens.engines.protocol import Needs, Read
from specens.engines.ray import RayEngine
from specens.engines.transformers.causal_lm import CausalLM

from specens_kernels import Sampling

PROMPTS = [[1, 2, 3, 1, 2], [4], [7, 8, 9]]
JOB = {"max_new_tokens": 12, "sampling": Sampling(temperature=0.0)}
DRAWN = {"max_new_tokens": 12, "seed": 3}
TREES = {
    "fixed": (2, 2),
    "drawn": TreePlan((2, 1, 1), children="sampled"),
    "grown": TreePlan(nodes=5, width=2, levels=3),
    "best first": TreePlan(nodes=4, width=2, levels=3, order="best"),
}


class Limited(CausalLM):
    """A model with room for 400 tokens."""

    def check_length(self, num_tokens):
        if num_tokens > 400:
            raise ValueError(f"cache: expected at most 400 tokens, got {num_tokens}")


def tiny(seed):
    """Makes a small model where it is called: of seed 1 one that mostly agrees with that of seed 0."""
    torch.set_num_threads(1)
    first = tiny_llama(0)
    return Limited(first if seed == 0 else relative_of(first, seed, noise=0.2))


@pytest.fixture(scope="module")
def actors(cluster):  # noqa: ARG001
    return [RayEngine(partial(tiny, seed)) for seed in (0, 1)]


@pytest.fixture(scope="module")
def strict_actors(cluster):  # noqa: ARG001
    return [RayEngine(partial(StrictEngine, seed, by_prompt)) for seed in (0, 1)]


@pytest.fixture(scope="module")
def here():
    return [tiny(seed) for seed in (0, 1)]


def texts_of(members, how, job, prompts=PROMPTS):
    """Of each text its tokens, and what was read for it."""
    texts = SpeculativeEnsemble(members, **how).generate_many(prompts, batch_size=2, **job)
    counts = ("forwards", "tokens_fed", "model_calls", "drafted", "accepted")
    ordered = sorted(texts, key=lambda text: text.index)
    assert len(ordered) == len(prompts)
    return [(text.tokens, *(getattr(text.statistics, name) for name in counts)) for text in ordered]


@pytest.fixture(scope="module")
def expected(here):
    return [tokens for tokens, *_ in texts_of(here, {"schedule": "standard"}, JOB)]


@pytest.mark.parametrize(
    "schedule",
    [{"schedule": "standard"}, {"schedule": "alternate"}, {"schedule": "parallel", "draft_lens": 3}],
    ids=str,
)
def test_every_schedule_writes_the_texts_of_members_in_this_process(actors, expected, schedule):
    ensemble = SpeculativeEnsemble(actors, **schedule)
    assert ensemble.generate(PROMPTS[0], **JOB).tokens == expected[0]
    assert [tokens for tokens, *_ in texts_of(actors, schedule, JOB)] == expected


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_trees_are_read_by_the_forwards_of_one_process(actors, here, expected, tree):
    how = {"tree": tree, "drafter": 1}
    for job in (JOB, DRAWN):
        assert texts_of(actors, how, job) == texts_of(here, how, job)
    assert [tokens for tokens, *_ in texts_of(actors, how, JOB)] == expected


@torch.inference_mode()
def test_trees_of_several_texts_are_one_forward(actors, here):
    contexts = [engine.open(Needs(2, trees=True)) for engine in (actors[0], here[0])]
    texts = [[context.add(prompt) for prompt in ([1, 2], [3])] for context in contexts]
    found = []
    for context, (one, other) in zip(contexts, texts, strict=True):
        context.read([Read(one, []), Read(other, [])])
        tree = {"num_rows": 4, "nodes": [5, 6, 7], "parents": [-1, -1, 0]}
        rows = context.read([Read(one, [4], **tree), Read(other, [8], num_rows=2, nodes=[9], parents=[-1])])
        found.append((rows, [(len(forward.texts), forward.num_tokens) for forward in context.forwards]))
        one.keep_path([0, 2])
        other.roll_back(0)
        found[-1][0].extend(context.read([Read(one, [4, 5, 7, 1]), Read(other, [3])]))
    assert found[0][1] == found[1][1] == [(2, [4, 2])]
    for one, other in zip(found[0][0], found[1][0], strict=True):
        assert torch.equal(one, other)


def test_an_actor_reads_trees_path_by_path_where_its_engine_does_not_hold_them(strict_actors):
    prompts = [[1, 2], [2, 1, 2], [3, 1], [4, 2, 1]]
    for tree in TREES.values():
        how = {"tree": tree, "drafter": 1}
        local = [StrictEngine(seed, by_prompt) for seed in (0, 1)]
        assert texts_of(strict_actors, how, JOB, prompts) == texts_of(local, how, JOB, prompts)


def kill_in_the_middle(members, how):
    """The text of members of which the second is killed when it has tokens, and how often it was told of some."""
    victim, pieces = members[1].process, []

    def kill_once(*_):
        pieces.append(1)
        if len(pieces) == 2:
            os.kill(victim, signal.SIGKILL)

    text = SpeculativeEnsemble(members, **how).generate(PROMPTS[0], on_tokens=kill_once, **JOB)
    assert len(pieces) > 2
    assert members[1].process != victim
    return text.tokens


def test_an_actor_that_is_killed_is_started_again_and_the_texts_are_the_same(actors, expected, strict_actors):
    assert kill_in_the_middle(actors, {"tree": (2, 2), "drafter": 1}) == expected[0]
    local = [StrictEngine(seed, by_prompt) for seed in (0, 1)]
    how = {"schedule": "alternate"}
    assert kill_in_the_middle(strict_actors, how) == texts_of(local, how, JOB, PROMPTS[:1])[0][0]


def test_what_an_engine_refuses_there_is_refused_here(actors):
    with pytest.raises(ValueError, match=r"prompt|token"):
        SpeculativeEnsemble(actors, schedule="standard").generate([10**6], **JOB)


def test_a_context_is_whole_after_a_read_that_raised(actors, here):
    context, plain = actors[0].open(Needs(2)), here[0].open(Needs(2))
    text, other = context.add([1, 2]), plain.add([1, 2])
    (first,) = context.read([Read(text, [])])
    gone = context.add([5])
    with pytest.raises(IndexError, match="out of range"):
        context.read([Read(text, [10**6])])
    context.remove(gone)
    text.roll_back(0)
    (again,) = context.read([Read(text, [3])])
    assert torch.equal(first, plain.read([Read(other, [])])[0])
    torch.testing.assert_close(again, plain.read([Read(other, [3])])[0])


def test_the_room_of_an_engine_there_is_asked_about(actors):
    actors[0].check_length(400)
    with pytest.raises(ValueError, match="cache: expected at most 400 tokens, got 401"):
        actors[0].check_length(401)


@pytest.mark.parametrize(
    ("options", "shown"), [({"num_cpus": 64}, "num_cpus 64"), ({"resources": {"desk": 3}}, "desk")]
)
def test_an_actor_without_a_place_says_so_in_time(cluster, options, shown):  # noqa: ARG001
    expected = (
        rf"members: expected a place for an actor with .*{shown}.* within 0.5 s, got none; free are .* of .*desk 2"
    )
    with pytest.raises(ValueError, match=expected):
        RayEngine(refuse, options=options, placement_timeout=0.5)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"gpus": 1}, r"options: expected options of a Ray actor, .*; got {'gpus': 1}: Invalid option keyword gpus"),
        ({"num_gpus": -1}, r"options: expected options of a Ray actor, .*; got {'num_gpus': -1}"),
        ([1], r"options: expected options of a Ray actor, .*, by their names; got \[1\]"),
        ({"max_restarts": 2}, r"options: expected options of a Ray actor, .*, and no max_restarts"),
    ],
)
def test_options_that_are_none_of_rays_are_refused(cluster, options, expected):  # noqa: ARG001
    with pytest.raises(ValueError, match=expected):
        RayEngine(refuse, options=options)
    with pytest.raises(ValueError, match="placement_timeout: expected seconds > 0, got 0"):
        RayEngine(refuse, placement_timeout=0)


def test_members_by_specs_have_what_ray_is_told_to_give_them(cluster, tmp_path):  # noqa: ARG001
    specs = [f"ray:{path}" for path in save_pair(tmp_path)]
    own = {"schedule": "standard", "dtype": "fp32"}
    with pytest.raises(ValueError, match="ray_options: expected one for each of 2 specs with ray: before them"):
        SpeculativeEnsemble(specs, ray_options=[{}], **own)
    with pytest.raises(ValueError, match=r"ray_options: expected options of a Ray actor, .* got {'desk': 1}"):
        SpeculativeEnsemble(specs, ray_options={"desk": 1}, **own)
    with pytest.raises(ValueError, match="ray_options: expected none without a spec with ray: before it"):
        SpeculativeEnsemble([specs[0].removeprefix("ray:")], ray_options={"num_gpus": 1}, **own)
    assert options_of_actors(specs, None, None) == [{"num_gpus": 1}] * 2
    assert options_of_actors(specs * 2, None, "cuda") == [{"num_gpus": 1 / 2}] * 4
    assert options_of_actors(specs, None, "cpu") == [{}, {}]
    assert options_of_actors(specs[0].split(":")[1:], None, None) is None
    options = [{"resources": {"desk": 1}}, {"num_gpus": 2, "resources": {"desk": 0.5}}]
    before = ray.available_resources()
    ensemble = SpeculativeEnsemble(specs, ray_options=options, **own)
    after = ray.available_resources()
    assert [before[name] - after[name] for name in ("desk", "GPU")] == [1.5, 2]
    assert len(ensemble.generate("w1 w2", max_new_tokens=3, temperature=0).tokens) == 3


def refuse():
    raise ValueError("model: expected another")


def test_what_loading_there_refuses_is_a_value_error_here(cluster):  # noqa: ARG001
    with pytest.raises(ValueError, match="model: expected another"):
        RayEngine(refuse)


def test_an_address_where_nobody_listens_is_named_at_once(monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    with pytest.raises(ValueError, match=r"members: expected a Ray cluster at 127\.0\.0\.1:9, found none: .*refused"):
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
    assert [name for name, *_ in context._waiting] == ["close"]
