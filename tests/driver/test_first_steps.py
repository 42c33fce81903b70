"""A new user's first calls work at once, and nothing that they say is ignored in silence."""

import importlib.metadata

import numpy as np
import pytest
import specens
import torch
from driver.tiny_models import PROMPT, relative_of, tiny_llama, tiny_tokenizer
from specens import MemberPrompts, SpeculativeEnsemble
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
        ({"tree": (2, 2)}, "fixed"),
        ({"drafter": PromptLookup()}, "fixed"),
    ],
    ids=["nothing", "member", "tree", "drafter"],
)
def test_the_schedule_follows_from_what_else_is_said(pair, arguments, schedule):
    assert SpeculativeEnsemble(pair, **arguments).schedule_name == schedule


@pytest.mark.parametrize("schedule", ["standard", "parallel"])
def test_trees_are_refused_where_none_are_drafted(pair, schedule):
    with pytest.raises(ValueError, match=rf"^tree: expected none under schedule '{schedule}'"):
        SpeculativeEnsemble(pair, schedule=schedule, tree=(2, 2))


@pytest.mark.parametrize("drafter", [0, 1, PromptLookup()], ids=["first", "second", "lookup"])
def test_a_drafter_is_refused_where_nothing_is_drafted(pair, drafter):
    with pytest.raises(ValueError, match=r"^drafter: expected none under schedule 'standard'"):
        SpeculativeEnsemble(pair, schedule="standard", drafter=drafter)


@pytest.mark.parametrize(
    ("schedule", "what"), [("standard", "under schedule 'standard'"), ("tree", "with draft trees")]
)
def test_draft_lengths_that_mean_nothing_are_warned_of(pair, schedule, what):
    with pytest.warns(UserWarning, match=rf"^draft_lens: 3 means nothing {what}"):
        SpeculativeEnsemble(pair, schedule=schedule, draft_lens=3)


@pytest.mark.parametrize("package", [specens, specens_kernels], ids=lambda package: package.__name__)
def test_a_package_shows_what_it_has_and_its_version(package):
    assert set(package.__all__) <= set(dir(package))
    assert all(getattr(package, name) is not None for name in dir(package))
    assert package.__version__ == importlib.metadata.version("specens-kernels")


def test_samples_of_neighbouring_seeds_have_no_text_in_common(pair):
    ensemble, job = SpeculativeEnsemble(pair), {"samples": 4, "max_new_tokens": 20}
    texts = {
        seed: {tuple(text.tokens) for text in ensemble.generate_many([PROMPT, PROMPT], seed=seed, **job)}
        for seed in range(3)
    }
    assert [len(own) for own in texts.values()] == [8] * 3
    assert len(set.union(*texts.values())) == 24


@pytest.mark.parametrize(
    ("prompt", "got"),
    [
        (b"w1", "bytes"),
        ([1.0, 2.0], "1.0|2.0"),
        ([True], "True"),
        (torch.ones(2), "float32"),
        (3, "int"),
        ([[]], "got 1|"),
    ],
    ids=str,
)
def test_what_is_no_prompt_is_refused(pair, prompt, got):
    with pytest.raises(ValueError, match=rf"^prompt: expected .*({got})"):
        SpeculativeEnsemble(pair, tiny_tokenizer()).generate(prompt, **JOB)


def test_ids_of_numpy_are_ids(pair):
    ensemble = SpeculativeEnsemble(pair)
    expected = ensemble.generate(PROMPT, **JOB).tokens
    for prompt in (np.array(PROMPT), [np.int64(token) for token in PROMPT], torch.tensor(PROMPT, dtype=torch.int32)):
        assert ensemble.generate(prompt, **JOB).tokens == expected


@pytest.mark.parametrize("prompts", ["w1 w2", b"w1", None, 3, {"prompt": "w1"}, MemberPrompts(["w1", "w2"])], ids=str)
def test_one_prompt_is_not_many(pair, prompts):
    with pytest.raises(ValueError, match=r"^prompts: expected several, such as a list, got "):
        SpeculativeEnsemble(pair, tiny_tokenizer()).generate_many(prompts)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": "0.7"}, "temperature: expected a number, got '0.7'"),
        ({"top_p": True}, "top_p: expected a number, got True"),
        ({"chat": "yes"}, "chat: expected True or False, got 'yes'"),
        ({"skip_special_tokens": 0}, "skip_special_tokens: expected True or False, got 0"),
        ({"on_tokens": 3}, "on_tokens: expected a function, got 3"),
        ({"on_round": []}, r"on_round: expected a function, got \[\]"),
    ],
    ids=str,
)
def test_settings_of_another_type_are_named(pair, settings, message):
    ensemble = SpeculativeEnsemble(pair)
    for call in (ensemble.generate, lambda prompt, **own: list(ensemble.generate_many([prompt], **own))):
        with pytest.raises(ValueError, match=f"^{message}"):
            call(PROMPT, **settings)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"members": [None]}, "members: expected models of transformers, specs or engines, got None as member 0"),
        ({"members": [torch.nn.Linear(2, 2)]}, "members: expected models .* got Linear as member 0"),
        ({"tokenizer": 3}, "tokenizer: expected one of transformers or a model spec, got 3"),
        ({"ensemble": (0.5, 0.5)}, r"ensemble: expected a Mixture, .*; got \(0.5, 0.5\)"),
        ({"drafter": tiny_llama(1)}, r"drafter: expected .* such as DraftModel\(model\); got LlamaForCausalLM$"),
        ({"draft_lens": "3"}, "draft_lens: expected an integer >= 1, .*; got '3'"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_arguments_of_another_type_are_named(pair, arguments, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        SpeculativeEnsemble(**{"members": pair, "tokenizer": tiny_tokenizer()} | arguments)


def test_a_tokenizer_may_come_by_its_spec(pair, tmp_path):
    tiny_tokenizer().save_pretrained(tmp_path)
    pair[0].config.save_pretrained(tmp_path)
    ensemble = SpeculativeEnsemble(pair, str(tmp_path))
    assert ensemble.generate("w5 w3 w8 w1", **JOB).tokens == ensemble.generate(PROMPT, **JOB).tokens
