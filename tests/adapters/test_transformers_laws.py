"""What sampled texts of transformers follow while this package verifies them: chi-square of the transitions."""

import pytest
import torch
from adapters.markov import LEAST_PROBABILITY, VOCAB, as_assistant, fit, logits_after, markov_llama
from driver.tiny_models import word_tokenizer
from scipy import stats
from specens.adapters.transformers import enable
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

TOKENS, SEEDS = 300, 2
WEIGHT = 0.3


@pytest.fixture(scope="module")
def target():
    return as_assistant(markov_llama(0, layers=2), 2)


@pytest.fixture(scope="module")
def assistant():
    return markov_llama(1)


def texts(model, **settings):
    found = []
    for seed in range(SEEDS):
        torch.manual_seed(seed)
        arguments = {"max_new_tokens": TOKENS, "do_sample": True, "top_k": 0, "pad_token_id": 0}
        found.append(model.generate(torch.tensor([[1]]), **(arguments | settings))[0])
        assert len(found[-1]) == TOKENS + 1
    return found


def filtered(logits, temperature, top_k, top_p):
    warpers = [TemperatureLogitsWarper(temperature), TopKLogitsWarper(top_k), TopPLogitsWarper(top_p)]
    return LogitsProcessorList(warpers)(torch.zeros(VOCAB, 1, dtype=torch.int64), logits.clone()).softmax(-1)


@pytest.mark.parametrize("filters", [{}, {"temperature": 0.7, "top_k": 5, "top_p": 0.9}], ids=["plain", "filtered"])
@pytest.mark.parametrize("source", ["draft model", "prompt lookup", "early exit"])
def test_assisted_texts_follow_the_target(target, assistant, source, filters):
    logits = logits_after(target)
    sources = {
        "draft model": {"assistant_model": as_assistant(assistant, 3)},
        "prompt lookup": {"prompt_lookup_num_tokens": 3},
        "early exit": {"assistant_early_exit": 1},
    }
    law = filtered(logits, **filters) if filters else logits.softmax(-1)
    with enable():
        found = texts(target, **filters, **sources[source])
    assert fit(found, law) > LEAST_PROBABILITY


def test_an_assistant_with_another_tokenizer_is_tested_against_what_it_drew_from(target):
    """The order of a vocabulary is not that of its ids, which transformers takes for granted."""
    assistant = as_assistant(markov_llama(1), 3)
    words = ["w0", "w1", "w3", "other", "w2", "w5"]
    assistant.resize_token_embeddings(len(words))
    tokenizers = {
        "tokenizer": word_tokenizer([f"w{token}" for token in range(VOCAB)]),
        "assistant_tokenizer": word_tokenizer(words),
    }
    with enable():
        found = texts(target, assistant_model=assistant, **tokenizers)
    assert fit(found, logits_after(target).softmax(-1)) > LEAST_PROBABILITY


@pytest.mark.parametrize(("source", "draft_len"), [("draft model", 1), ("draft model", 3), ("early exit", 2)])
def test_an_ensemble_weight_gives_every_token_the_mixture(target, assistant, source, draft_len):
    first, second = logits_after(target), logits_after(assistant)
    arguments = {"assistant_model": as_assistant(assistant, draft_len)}
    if source == "early exit":
        second, arguments = logits_after(_first_layer(target)), {"assistant_early_exit": 1}
    with enable():
        found = texts(target, assistant_ensemble_weight=WEIGHT, **arguments)
    law = WEIGHT * first.softmax(-1) + (1 - WEIGHT) * second.softmax(-1)
    assert fit(found, law) > LEAST_PROBABILITY
    assert fit(found, first.softmax(-1)) < LEAST_PROBABILITY


def _first_layer(model):
    other = markov_llama(0, layers=2)
    other.load_state_dict(model.state_dict())
    other.config.num_hidden_layers = 1
    return other


def test_an_ensemble_weight_mixes_what_the_filters_left_of_each(target, assistant):
    filters = {"temperature": 0.7, "top_k": 4, "top_p": 0.9}
    with enable():
        found = texts(target, assistant_model=as_assistant(assistant, 2), assistant_ensemble_weight=WEIGHT, **filters)
    first, second = (filtered(logits_after(model), **filters) for model in (target, assistant))
    assert fit(found, WEIGHT * first + (1 - WEIGHT) * second) > LEAST_PROBABILITY


def test_greedy_with_an_ensemble_weight_takes_the_most_likely_of_the_mixture(target, assistant):
    law = WEIGHT * logits_after(target).softmax(-1) + (1 - WEIGHT) * logits_after(assistant).softmax(-1)
    best = law.argmax(-1).tolist()
    assert best != logits_after(target).argmax(-1).tolist()
    for start in range(VOCAB):
        with enable():
            text = target.generate(
                torch.tensor([[start]]),
                max_new_tokens=9,
                do_sample=False,
                assistant_model=as_assistant(assistant, 2),
                assistant_ensemble_weight=WEIGHT,
            )[0].tolist()
        assert text[1:] == [best[token] for token in text[:-1]]


def test_a_prefix_that_matters_to_a_processor_is_the_one_before_the_token(target, assistant):
    """The law of two tokens after a repetition penalty, which depends on the whole text."""
    runs = 300
    with enable():
        found = [texts_of_two(target, assistant, seed).tolist() for seed in range(runs)]
    counts = torch.zeros(VOCAB, VOCAB)
    for first, second in found:
        counts[first, second] += 1
    logits = logits_after(target)
    law = torch.zeros(VOCAB, VOCAB)
    first_law = penalised(logits[1], [1]).softmax(-1)
    for first in range(VOCAB):
        law[first] = first_law[first] * penalised(logits[first], [1, first]).softmax(-1)
    frequent = runs * law >= 5
    squares = ((counts - runs * law) ** 2 / (runs * law))[frequent]
    assert stats.chi2.sf(float(squares.sum()), int(frequent.sum()) - 1) > LEAST_PROBABILITY


def texts_of_two(target, assistant, seed):
    torch.manual_seed(seed)
    return target.generate(
        torch.tensor([[1]]),
        max_new_tokens=2,
        do_sample=True,
        top_k=0,
        pad_token_id=0,
        repetition_penalty=3.0,
        assistant_model=as_assistant(assistant, 1),
    )[0, 1:]


def penalised(logits, seen):
    row = logits.clone()
    for token in set(seen):
        row[token] = row[token] / 3 if row[token] > 0 else row[token] * 3
    return row
