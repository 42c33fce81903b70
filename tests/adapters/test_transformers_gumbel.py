"""`enable(rule="gumbel")`: for a seed, transformers samples the same text with any assistant and with none."""

import pytest
import torch
import transformers
from cases import FULL
from driver.tiny_models import PROMPT, relative_of, tiny_llama
from specens.adapters.transformers import enable

IDS = torch.tensor([PROMPT])
SETTINGS = [
    {"top_k": 0},
    {"temperature": 0.7, "top_k": 12, "top_p": 0.9},
    {"temperature": 1.3, "min_p": 0.05, "top_k": 0, "repetition_penalty": 1.2, "no_repeat_ngram_size": 3},
]


@pytest.fixture(scope="module")
def target():
    model = tiny_llama(0, num_hidden_layers=3)
    model.generation_config.assistant_confidence_threshold = 0.0
    return model


def text(model, seed, **arguments):
    transformers.set_seed(seed)
    settings = {"max_new_tokens": 20 if FULL else 14, "do_sample": True, "pad_token_id": 0}
    return model.generate(arguments.pop("input_ids", IDS), **(settings | arguments))


@pytest.mark.parametrize("settings", SETTINGS, ids=["plain", "filters", "penalties"])
def test_a_seed_is_a_text_with_any_assistant_and_with_none(target, settings):
    assistants = [
        {"assistant_model": relative_of(target, 1, noise=0.2)},
        {"assistant_model": tiny_llama(9)},
        {"prompt_lookup_num_tokens": 3},
        {"assistant_early_exit": 2},
    ]
    seeds = range(2 if FULL else 1)
    with enable(rule="gumbel"):
        alone = [text(target, seed, **settings) for seed in range(2)]
        assert not torch.equal(*alone)
        for assistant in assistants:
            assert all(torch.equal(text(target, seed, **settings, **assistant), alone[seed]) for seed in seeds)


def test_padding_is_no_position(target):
    with enable(rule="gumbel"):
        alone = text(target, 3)
        padded = torch.tensor([[0, 0, 0, *PROMPT], [1, 2, 3, 4, 5, 6, 7]])
        mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1] * 7])
        batch = text(target, 3, input_ids=padded, attention_mask=mask)
    assert torch.equal(batch[0, 7:], alone[0, len(PROMPT) :])


def test_first_tokens_follow_the_model(target):
    settings = {"temperature": 0.8, "top_k": 5, "max_new_tokens": 1, "num_return_sequences": 2000}
    with enable(rule="gumbel"):
        drawn = text(target, 0, **settings)[:, -1]
    with torch.no_grad():
        kept = (target(IDS).logits[0, -1] / 0.8).topk(5)
    counts = torch.tensor([int((drawn == token).sum()) for token in kept.indices])
    expected = kept.values.softmax(-1) * len(drawn)
    assert counts.sum() == len(drawn)
    assert float(((counts - expected) ** 2 / expected).sum()) < 23.5  # chi-square, 4 degrees of freedom: .0001


def test_blocks_nest_and_wrong_settings_are_named(target):
    with pytest.raises(ValueError, match="rule: expected 'token' or 'gumbel', got 'best'"):
        enable(rule="best")
    plain = text(target, 1)
    with enable(rule="gumbel"):
        by_gumbel = text(target, 1)
        with enable():
            assert torch.equal(text(target, 1), plain)
        assert torch.equal(text(target, 1), by_gumbel)
        shown = text(target, 1, return_dict_in_generate=True, output_scores=True)
        assert torch.equal(shown.sequences, by_gumbel)
        assert all(int(torch.isfinite(scores).sum()) == 50 for scores in shown.scores)  # top_k of transformers
    assert torch.equal(text(target, 1), plain)
    assert not torch.equal(by_gumbel, plain)
