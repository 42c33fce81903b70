"""A new user's first calls work at once, and nothing that they say is ignored in silence."""

import importlib.metadata

import pytest
import specens
from driver.tiny_models import PROMPT, relative_of, tiny_llama
from specens import SpeculativeEnsemble
from specens.drafters import PromptLookup

import specens_kernels
from specens_kernels import Sampling

GREEDY = Sampling(temperature=0.0)
JOB = {"max_new_tokens": 20, "sampling": GREEDY}


@pytest.fixture(scope="module")
def pair():
    first = tiny_llama(0)
    return [first, relative_of(first, 1, noise=0.2)]


def test_a_lone_model_is_drafted_for_by_lookup(pair):
    alone = SpeculativeEnsemble(pair[:1])
    assert alone.schedule_name == "fixed"
    assert isinstance(alone.plan.drafter, PromptLookup)
    text = alone.generate(PROMPT * 3, **JOB)
    assert text.tokens == SpeculativeEnsemble(pair[:1], schedule="standard").generate(PROMPT * 3, **JOB).tokens
    assert sum(text.statistics.drafted) > 0


@pytest.mark.parametrize(
    ("arguments", "schedule"),
    [
        ({}, "alternate"),
        ({"drafter": 1}, "alternate"),
        ({"tree": (2, 2)}, "tree"),
        ({"drafter": PromptLookup()}, "fixed"),
    ],
    ids=["nothing", "member", "tree", "drafter"],
)
def test_the_schedule_follows_from_what_else_is_said(pair, arguments, schedule):
    assert SpeculativeEnsemble(pair, **arguments).schedule_name == schedule


@pytest.mark.parametrize("schedule", ["standard", "fixed", "alternate"])
def test_trees_are_refused_where_none_are_drafted(pair, schedule):
    with pytest.raises(ValueError, match=rf"^tree: expected none under schedule '{schedule}'"):
        SpeculativeEnsemble(pair, schedule=schedule, tree=(2, 2))


@pytest.mark.parametrize("drafter", [0, 1, PromptLookup()], ids=["first", "second", "lookup"])
def test_a_drafter_is_refused_where_nothing_is_drafted(pair, drafter):
    with pytest.raises(ValueError, match=r"^drafter: expected none under schedule 'standard'"):
        SpeculativeEnsemble(pair, schedule="standard", drafter=drafter)


@pytest.mark.parametrize("schedule", ["standard", "tree"])
def test_draft_lengths_that_mean_nothing_are_warned_of(pair, schedule):
    with pytest.warns(UserWarning, match=rf"^draft_lens: 3 means nothing under schedule '{schedule}'"):
        SpeculativeEnsemble(pair, schedule=schedule, draft_lens=3)


@pytest.mark.parametrize("package", [specens, specens_kernels], ids=lambda package: package.__name__)
def test_a_package_shows_what_it_has_and_its_version(package):
    assert set(package.__all__) <= set(dir(package))
    assert all(getattr(package, name) is not None for name in dir(package))
    assert package.__version__ == importlib.metadata.version("specens-kernels")


def test_samples_of_neighbouring_seeds_have_no_text_in_common(pair):
    ensemble = SpeculativeEnsemble(pair)
    texts = {
        seed: {tuple(text.tokens) for text in ensemble.generate_many([PROMPT, PROMPT], samples=4, seed=seed)}
        for seed in range(3)
    }
    assert [len(own) for own in texts.values()] == [8] * 3
    assert len(set.union(*texts.values())) == 24
