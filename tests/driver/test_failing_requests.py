"""A request that fails ends no other of its batch."""

import pytest
import torch
from driver.test_schedules import GREEDY
from driver.tiny_models import PROMPT, relative_of, tiny_llama
from specens import Job, SpeculativeEnsemble
from specens.settings.jobs import derived_seed

from specens_kernels import Mixture, Sampling

SCHEDULES = {
    "standard": {},
    "fixed": {"draft_lens": 3},
    "alternate": {"draft_lens": (2, 3)},
    "trees": {"schedule": "fixed", "tree": (2, 2), "drafter": 1},
}
FAILING = 1  # the prompt
PROMPTS = [PROMPT, [7, 7], [4, 4, 1], [3, 2], [9]]


@pytest.fixture(scope="module")
def pair():
    first = tiny_llama(0)
    return [first, relative_of(first, 1, noise=0.2)]


def make(pair, name):
    return SpeculativeEnsemble(pair, **({"schedule": name} | SCHEDULES[name]))


def no_good(ids, scores):
    """A logits processor that fails in the middle of the text after one prompt."""
    if ids[0, :2].tolist() == PROMPTS[FAILING] and ids.shape[1] > 6:
        raise ZeroDivisionError("a fault of the caller's")
    return scores


def nothing_left(ids, scores):
    """One after which no token can be drawn there."""
    dead = ids[0, :2].tolist() == PROMPTS[FAILING] and ids.shape[1] > 6
    return torch.full_like(scores, float("-inf")) if dead else scores


def failing(ensemble, processor, **settings):
    errors = []
    texts = ensemble.generate_many(
        PROMPTS,
        batch_size=3,
        max_new_tokens=14,
        seed=3,
        logits_processors=[processor],
        on_error=lambda *error: errors.append(error),
        **settings,
    )
    return {text.index: text.tokens for text in texts}, errors


@pytest.mark.parametrize(
    ("processor", "error"), [(no_good, ZeroDivisionError), (nothing_left, RuntimeError)], ids=["raises", "dead end"]
)
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_others_write_what_they_write_alone(pair, name, processor, error):
    ensemble = make(pair, name)
    for sampling in (GREEDY, Sampling(temperature=0.8)):
        if name == "alternate" and sampling is not GREEDY:
            continue  # whose drafts outlive a round, and may be another member's when it begins anew
        texts, errors = failing(ensemble, processor, sampling=sampling)
        assert [(index, sample, type(own)) for index, sample, own in errors] == [(FAILING, 0, error)]
        alone = {
            index: ensemble.generate(
                prompt, max_new_tokens=14, seed=derived_seed(3, index, 0), sampling=sampling
            ).tokens
            for index, prompt in enumerate(PROMPTS)
            if index != FAILING
        }
        assert texts == alone


def test_without_a_function_texts_under_way_are_finished_and_then_the_error_is_raised(pair):
    ensemble, found = make(pair, "fixed"), []
    texts = ensemble.generate_many(PROMPTS, batch_size=3, max_new_tokens=14, logits_processors=[no_good])
    with pytest.raises(ZeroDivisionError, match="a fault of the caller's"):
        found.extend(text.index for text in texts)
    assert sorted(found) == [0, 2]
    jobs = [PROMPT, [7], Job([8], temperature=-1.0), [9]]
    texts = ensemble.generate_many(jobs, batch_size=2, max_new_tokens=5)
    with pytest.raises(ValueError, match="temperature: expected"):
        found.extend(text.index for text in texts)
    assert sorted(found) == [0, 0, 1, 2]


def test_a_job_with_wrong_settings_is_told_and_the_next_take_its_place(pair):
    ensemble, errors = make(pair, "alternate"), []
    jobs = [PROMPT, Job([8], temperature=-1.0), [999], [9]]
    texts = ensemble.generate_many(
        jobs, batch_size=2, max_new_tokens=5, samples=2, on_error=lambda *own: errors.append(own)
    )
    assert sorted((text.index, text.sample) for text in texts) == [(0, 0), (0, 1), (3, 0), (3, 1)]
    assert [(index, sample, type(error)) for index, sample, error in errors] == [
        (index, sample, ValueError) for index in (1, 2) for sample in (0, 1)
    ]


@pytest.mark.parametrize("name", ["standard", "fixed", "alternate", "trees"])
def test_a_token_that_a_member_cannot_read_ends_its_own_text(name):
    wide = tiny_llama(1, vocab=80)
    members = [tiny_llama(0, vocab=61), wide]
    ensemble = SpeculativeEnsemble(members, ensemble=Mixture((0.8, 0.2)), **({"schedule": name} | SCHEDULES[name]))
    texts, errors = {}, []
    for text in ensemble.generate_many(
        [PROMPT, [7, 7], [3], [9, 2]] * 4,
        batch_size=3,
        max_new_tokens=6,
        seed=1,
        on_error=lambda *own: errors.append(own),
    ):
        texts[text.index] = text.tokens
    failed = {index for index, *_ in errors}
    assert failed
    assert texts
    assert failed | texts.keys() == set(range(16))
    for _, _, error in errors:
        assert isinstance(error, ValueError)
        assert "was generated, but member 0 has embeddings only for ids below 61" in str(error)
    assert all(max(tokens[:-1]) < 61 for tokens in texts.values())


def test_a_constraint_that_fails_ends_its_own_text(pair):
    ensemble, errors = make(pair, "fixed"), []

    def constraint(tokens):
        if len(tokens) > 3 and tokens[0] % 2:
            raise KeyError("no such state")
        return torch.tensor([-1, (1 << 29) - 1], dtype=torch.int32)

    settings = {"max_new_tokens": 9, "seed": 3, "constraint": constraint}
    texts = {
        text.index: text
        for text in ensemble.generate_many(PROMPTS, on_error=lambda *own: errors.append(own), **settings)
    }
    odd = {index for index, *_ in errors}
    assert odd
    assert odd | texts.keys() == set(range(len(PROMPTS)))
    assert not odd & texts.keys()
    assert all(isinstance(error, KeyError) for *_, error in errors)
    with pytest.raises(KeyError, match="no such state"):
        ensemble.generate(PROMPTS[min(odd)], **(settings | {"seed": derived_seed(3, min(odd), 0)}))
