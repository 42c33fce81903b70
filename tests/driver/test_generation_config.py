"""A model's generation config is honoured as `generate` of transformers honours it, or refused by name: every field."""

import copy
import warnings

import pytest
import torch
from driver.tiny_models import PROMPT, relative_of, tiny_llama, tiny_tokenizer
from specens import Job, MemberPrompts, SpeculativeEnsemble
from specens.engines.transformers.generation_config import HONOURED, MEANINGLESS, REFUSED
from specens.schedules import SCHEDULES
from transformers import GenerationConfig, WatermarkingConfig

from specens_kernels import Mixture, Processing, Sampling

TOKENS = 24
GREEDY_FIELDS = {
    "repetition_penalty": {"repetition_penalty": 1.7},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[7], [3, 9], [11]]},
    "sequence_bias": {"sequence_bias": [[[9], -9.0], [[2, 2], -9.0]]},
    "suppress_tokens": {"suppress_tokens": list(range(10))},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(5, 55))},
    "forced_bos_token_id": {"forced_bos_token_id": 10, "prompt": [5]},
    "forced_eos_token_id": {"forced_eos_token_id": 8},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (4, 1.6), "eos_token_id": 8},
    "remove_invalid_values": {"remove_invalid_values": True},
    "watermarking_config": {"watermarking_config": WatermarkingConfig(bias=5.0)},
    "eos_token_id": {"eos_token_id": [13, 14, 27, 40]},
    "min_new_tokens": {"min_new_tokens": 9, "eos_token_id": list(range(0, 61, 2))},
    "min_length": {"min_length": 12, "eos_token_id": list(range(0, 61, 2))},
    "max_length": {"max_length": 11, "max_new_tokens": None},
    "max_new_tokens": {"max_new_tokens": 5},
    "several": {
        "repetition_penalty": 1.4,
        "no_repeat_ngram_size": 3,
        "suppress_tokens": [1, 2, 3],
        "min_new_tokens": 4,
    },
}
FILTERS = {
    "temperature": {"temperature": 0.4},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.2},
    "typical_p": {"typical_p": 0.5},
    "top_h": {"top_h": 0.4},
    "epsilon_cutoff": {"epsilon_cutoff": 0.05},
    "eta_cutoff": {"eta_cutoff": 0.1},
    "together": {
        "temperature": 0.7,
        "top_k": 9,
        "top_p": 0.8,
        "min_p": 0.02,
        "typical_p": 0.9,
        "repetition_penalty": 1.3,
    },
}


@pytest.fixture
def model():
    return tiny_llama(0)


def configured(model, **fields):
    model.generation_config = GenerationConfig(**fields)
    return model


@pytest.mark.parametrize("name", GREEDY_FIELDS)
def test_a_greedy_text_is_that_of_generate(model, name):
    fields = {"max_new_tokens": TOKENS, "pad_token_id": 0} | GREEDY_FIELDS[name]
    prompt = fields.pop("prompt", PROMPT)
    plain = model.generate(torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False)[0].tolist()
    configured(model, do_sample=False, **fields)
    expected = model.generate(torch.tensor([prompt]))[0].tolist()
    assert expected != plain or name == "remove_invalid_values"
    for schedule in (None, "standard"):
        ensemble = SpeculativeEnsemble([model], tiny_tokenizer(), schedule=schedule)
        assert prompt + ensemble.generate(prompt).tokens == expected
        both = [text.tokens for text in ensemble.generate_many([prompt, [1, 2, 3, *prompt]])]
        assert prompt + both[0] == expected or prompt + both[1] == expected


def support(model, prompt):
    """The probabilities of the next token by transformers, [vocab]."""
    with torch.inference_mode():
        text = model.generate(
            torch.tensor([prompt]), max_new_tokens=1, output_scores=True, return_dict_in_generate=True
        )
    return text.scores[0][0].softmax(-1)


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("schedule", ["standard", None])
def test_a_sampled_text_has_the_distribution_of_generate(model, name, schedule):
    configured(model, do_sample=True, pad_token_id=0, **FILTERS[name])
    ensemble = SpeculativeEnsemble([model], schedule=schedule)
    text = ensemble.generate(PROMPT, max_new_tokens=6, seed=3, logprobs=True)
    for step, (token, logprob) in enumerate(zip(text.tokens, text.logprobs, strict=True)):
        probability = float(support(model, PROMPT + text.tokens[:step])[token])
        assert abs(probability - torch.tensor(logprob).exp()) < 1e-4


def sampling_of(members, settings, **arguments):
    """How a call draws its tokens."""
    from specens.settings.jobs import TaskMaker

    task = TaskMaker(SpeculativeEnsemble(members, **arguments), settings)(Job(PROMPT), 0, 0)
    return task.sampling


def test_what_nobody_says_is_temperature_one_without_filters(model):
    assert sampling_of([model], {}) == Sampling()
    assert sampling_of([configured(model, temperature=0.5)], {}) == Sampling(0.5)
    assert sampling_of([configured(model, do_sample=False)], {}) == Sampling(0.0)
    assert sampling_of([configured(model, do_sample=True, temperature=0.6)], {}) == Sampling(0.6, top_k=50)
    assert GenerationConfig()._get_default_generation_params()["top_k"] == 50
    assert sampling_of([configured(model, do_sample=True, top_k=0)], {}) == Sampling()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"sampling": Sampling(0.9)}, Sampling(0.9)),
        ({"temperature": 0.9}, Sampling(0.9, 7, 0.8)),
        ({"temperature": 2}, Sampling(2.0, 7, 0.8)),
        ({"top_p": 1.0, "top_k": 0}, Sampling(0.6, None, 1.0)),
        ({"min_p": 0.1}, Sampling(0.6, 7, 0.8, 0.1)),
        ({"temperature": 0}, Sampling(0.0)),
        ({"do_sample": False}, Sampling(0.0)),
        ({"do_sample": True}, Sampling(0.6, 7, 0.8)),
        ({"generation_config": "none"}, Sampling()),
        ({"generation_config": "none", "do_sample": True}, Sampling(1.0, 50)),
        ({"generation_config": GenerationConfig(top_k=4)}, Sampling(0.6, 4, 0.8)),
        ({"generation_config": GenerationConfig(do_sample=False)}, Sampling(0.0)),
    ],
    ids=str,
)
def test_what_a_call_says_wins(model, settings, expected):
    configured(model, do_sample=True, temperature=0.6, top_k=7, top_p=0.8)
    assert sampling_of([model], settings) == expected
    model.generation_config.do_sample = False
    if "temperature" in settings or "min_p" in settings:
        assert sampling_of([model], settings) == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sampling": Sampling(), "temperature": 0.5}, r"temperature: expected none beside sampling="),
        ({"sampling": Sampling(), "do_sample": False}, r"do_sample: expected none beside sampling="),
        ({"do_sample": False, "top_p": 0.5}, r"top_p: expected none beside do_sample=False"),
        ({"do_sample": True, "temperature": 0}, r"temperature: expected a number > 0 beside do_sample=True"),
        ({"do_sample": 1.5}, r"do_sample: expected True or False"),
        ({"temperature": -1}, r"temperature: expected a finite number >= 0"),
        ({"stop": ["w1"], "stop_strings": ["w2"]}, r"stop: expected none beside stop_strings="),
        ({"generation_config": 5}, r"generation_config: expected a transformers GenerationConfig"),
    ],
    ids=str,
)
def test_settings_that_contradict_each_other_are_named(model, settings, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        SpeculativeEnsemble([model], tiny_tokenizer()).generate(PROMPT, **settings)


def test_stop_is_another_name_of_stop_strings(model):
    ensemble = SpeculativeEnsemble([model], tiny_tokenizer())
    job = {"max_new_tokens": 40, "seed": 0}
    expected = ensemble.generate(PROMPT, stop_strings=["w3"], **job)
    assert expected.finish_reason == "stop"
    assert ensemble.generate(PROMPT, stop="w3", **job).tokens == expected.tokens
    configured(model, stop_strings=["w3"])
    assert ensemble.generate(PROMPT, **job).tokens == expected.tokens
    with pytest.raises(ValueError, match=r"^stop_strings: text needs a tokenizer"):
        SpeculativeEnsemble([model]).generate(PROMPT, **job)


def test_processing_and_stop_tokens_of_a_call_are_in_place_of_those_of_the_config(model):
    plain = SpeculativeEnsemble([model]).generate(PROMPT, do_sample=False, max_new_tokens=TOKENS).tokens
    configured(model, do_sample=False, repetition_penalty=1.7, eos_token_id=plain[3], max_new_tokens=TOKENS)
    ensemble = SpeculativeEnsemble([model])
    assert ensemble.generate(PROMPT, processing=Processing(), stop_tokens=()).tokens == plain
    assert ensemble.generate(PROMPT, processing=Processing()).tokens == plain[: plain.index(plain[3]) + 1]
    assert ensemble.generate(PROMPT, stop_tokens=()).tokens != plain


def test_every_field_is_in_one_table():
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    tables = [*HONOURED, *REFUSED, *MEANINGLESS]
    assert len(tables) == len(set(tables))
    assert fields - set(tables) == set()
    tested = {name for row in (*GREEDY_FIELDS.values(), *FILTERS.values()) for name in row}
    assert set(HONOURED) - tested == {"do_sample", "stop_strings"}  # each has a test of its own


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_that_cannot_be_honoured_is_refused_where_it_is_set(model, name):
    ensemble = SpeculativeEnsemble([model])
    for value in REFUSED[name][0]:
        setattr(model.generation_config, name, value)
        ensemble.generate(PROMPT, max_new_tokens=1)
    setattr(model.generation_config, name, {"cache_implementation": "static"}.get(name, 3))
    with pytest.raises(ValueError, match=rf"^{name}: expected .* in a generation config, got"):
        ensemble.generate(PROMPT, max_new_tokens=1)
    ensemble.generate(PROMPT, max_new_tokens=1, generation_config="none")


@pytest.mark.parametrize("name", MEANINGLESS)
def test_a_field_without_meaning_changes_no_text(model, name):
    ensemble = SpeculativeEnsemble([model])
    expected = ensemble.generate(PROMPT, max_new_tokens=12, seed=0).tokens
    setattr(model.generation_config, name, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ensemble.generate(PROMPT, max_new_tokens=12, seed=0).tokens == expected


def test_a_field_that_nobody_knows_is_warned_of(model):
    model.generation_config.sparkle = 3
    with pytest.warns(UserWarning, match=r"^sparkle: 3 of the generation config is not known here"):
        SpeculativeEnsemble([model]).generate(PROMPT, max_new_tokens=1)


def test_the_config_is_that_of_the_first_member_that_counts_and_differences_are_warned_of(model):
    other = relative_of(model, 1)
    configured(model, do_sample=True, temperature=0.5)
    configured(other, do_sample=True, temperature=0.9)
    with pytest.warns(
        UserWarning, match=r"^generation_config: members 0 and 1 differ in temperature; .* member 0 holds"
    ):
        assert sampling_of([model, other], {}) == Sampling(0.5, 50)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sampling_of([model, other], {"sampling": Sampling()}) == Sampling()
        assert sampling_of([model, other], {}, ensemble=Mixture((0.0, 1.0)), schedule="fixed") == Sampling(0.9, 50)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_ensemble_edits_the_logits_of_every_member_by_its_own_prompt(model, schedule):
    pair = [configured(model, do_sample=False, no_repeat_ngram_size=1, suppress_tokens=[4]), relative_of(model, 1, 0.2)]
    ensemble = SpeculativeEnsemble(
        pair, schedule=schedule, draft_lens=2 if schedule in ("fixed", "alternate") else None
    )
    prompts = MemberPrompts([PROMPT, [9, 10, 11, 12, 13]])
    tokens = ensemble.generate(prompts, max_new_tokens=8).tokens
    assert len({*tokens, 4}) == 9


def test_a_saved_config_is_honoured_with_the_model(model, tmp_path):
    configured(model, do_sample=False, no_repeat_ngram_size=2, max_new_tokens=13)
    expected = model.generate(torch.tensor([PROMPT]), pad_token_id=0)[0, len(PROMPT) :].tolist()
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    ensemble = SpeculativeEnsemble([str(tmp_path)], dtype="fp32", device="cpu")
    assert ensemble.generate(PROMPT).tokens == expected
    assert copy.copy(ensemble.models[0].base.generation_config).max_new_tokens == 13
