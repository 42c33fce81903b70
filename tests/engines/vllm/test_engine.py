"""vLLM's engine with the plug-in: what it writes has the law of its model, whatever drafts."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch
from engines.vllm.exact_law import exact_law, p_value

from specens_kernels import Sampling

LENGTH, TEXTS = 3, 1500
PROMPT = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
PLAIN = {"temperature": 1.0}
FILTERED = {"temperature": 0.7, "top_k": 6, "top_p": 0.9, "min_p": 0.05}
PENALISED = {"temperature": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": -0.3}
BIASED = {"temperature": 1.2, "logit_bias": {3: -2.0, 5: 2.5}, "allowed_token_ids": [0, 1, 3, 5, 6, 8, 11]}
DRAFTERS = ["n-gram", "draft model", "drawn drafts"]
ALLOWED = torch.tensor([sum(1 << token for token in BIASED["allowed_token_ids"])], dtype=torch.int32)


def request(settings, repeat=1, length=LENGTH, prompt=PROMPT, **more):
    params = {"max_tokens": length, "ignore_eos": True, "detokenize": False, **settings, **more}
    return {"prompt": prompt, "params": params, "repeat": repeat}


@pytest.fixture(scope="session")
def laws(target):
    """Of texts under PLAIN, FILTERED, PENALISED and BIASED."""
    bias = BIASED["logit_bias"]
    edits = [{}, {}, {name: PENALISED[name] for name in PENALISED if name != "temperature"}]
    edits.append({"logit_bias": (torch.tensor(list(bias)), torch.tensor(list(bias.values()))), "allowed": ALLOWED})
    filters = ("temperature", "top_k", "top_p", "min_p")

    def law(settings, edit):
        sampling = Sampling(**{name: settings[name] for name in filters if name in settings}, filter_order="vllm")
        return exact_law(target, PROMPT, LENGTH, sampling, **edit)

    return [law(settings, edit) for settings, edit in zip((PLAIN, FILTERED, PENALISED, BIASED), edits)]


@pytest.mark.parametrize("drafter", ["none", *DRAFTERS])
def test_texts_have_the_law_of_the_model(texts, target, speculation, laws, drafter):
    batch = [request(settings, TEXTS) for settings in (PLAIN, FILTERED, PENALISED, BIASED)]
    result = texts(target, [batch], speculation[drafter], skip_tokenizer_init=True)
    drawn = [completion["tokens"] for completion in result["batches"][0]]
    fits = [p_value(law, drawn[index * TEXTS : (index + 1) * TEXTS]) for index, law in enumerate(laws)]
    assert min(fits) > 1e-4, fits
    if drafter != "none":
        assert 0 < result["accepted"] < result["drafts"]


@pytest.mark.parametrize("drafter", ["n-gram", "draft model"])
def test_without_the_plug_in_they_have_not(texts, target, speculation, laws, drafter):
    result = texts(target, [[request(PLAIN, TEXTS)]], speculation[drafter], plug_in=False, skip_tokenizer_init=True)
    assert p_value(laws[0], [completion["tokens"] for completion in result["batches"][0]]) < 1e-9


def test_without_the_plug_in_top_k_ends_the_engine(run_engine, target, speculation):
    batch = [request({"temperature": 0.7, "top_k": 6}, 8, length=16)]
    run = run_engine(target, [batch], speculation["n-gram"], plug_in=False, skip_tokenizer_init=True)
    assert run.returncode != 0
    assert run.texts is None


def edited_requests():
    """Greedy ones that each ask for something else."""
    return [
        request({"temperature": 0.0}, length=24),
        request({"temperature": 0.0}, length=24, repetition_penalty=1.4, frequency_penalty=0.6, presence_penalty=0.2),
        request({"temperature": 0.0}, length=24, logit_bias={7: 3.0, 2: -100.0}),
        request({"temperature": 0.0}, length=24, allowed_token_ids=[0, 2, 4, 6, 8]),
        request({"temperature": 0.0}, length=24, stop_token_ids=list(range(6)), min_tokens=9, ignore_eos=False),
    ]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_texts_are_those_without_speculation(texts, target, speculation, drafter):
    batch = [edited_requests(), edited_requests()[:1]]
    expected = texts(target, batch, None, plug_in=False, skip_tokenizer_init=True)
    result = texts(target, batch, speculation[drafter], skip_tokenizer_init=True)
    assert result["accepted"] > 0
    assert result["batches"] == expected["batches"]


@pytest.mark.parametrize("drafter", ["n-gram", "draft model"])
def test_a_seeded_text_does_not_depend_on_the_batch(texts, target, speculation, drafter):
    seeded = [request(settings, length=24, seed=5) for settings in (PLAIN, FILTERED, PENALISED)]
    others = [request(PLAIN, 13, length=20), request(FILTERED, 4, length=31, prompt=[5, 6, 7])]
    batches = [[seeded[0]], [seeded[1]], [seeded[2]], [*others, *seeded], [*seeded, *others]]
    alone = texts(target, batches, speculation[drafter], skip_tokenizer_init=True)["batches"]
    expected = [batch[0] for batch in alone[:3]]
    assert alone[3][17:] == expected
    assert alone[4][:3] == expected
    assert len({tuple(completion["tokens"]) for completion in alone[3][:13]}) > 1


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs", "raw_logits"])
def test_reports_are_those_without_speculation(texts, target, speculation, mode):
    batch = [
        request({"temperature": 0.0}, length=16, logprobs=3),
        request({"temperature": 0.0}, length=16, logprobs=0, repetition_penalty=1.3),
        request({"temperature": 0.0}, length=16),
    ]
    settings = {"skip_tokenizer_init": True, "logprobs_mode": mode}
    expected = texts(target, [batch], None, plug_in=False, **settings)["batches"][0]
    result = texts(target, [batch], speculation["n-gram"], **settings)
    assert result["accepted"] > 0
    for got, wanted in zip(result["batches"][0], expected):
        assert got["tokens"] == wanted["tokens"]
        assert (got["report"] is None) == (wanted["report"] is None)
        for step, wanted_step in zip(got["report"] or [], wanted["report"] or []):
            assert [entry[0] for entry in step] == [entry[0] for entry in wanted_step]
            assert [entry[2] for entry in step] == [entry[2] for entry in wanted_step]
            for entry, wanted_entry in zip(step, wanted_step):
                assert math.isclose(entry[1], wanted_entry[1], abs_tol=1e-4)


def test_bad_words_and_grammars_are_kept(texts, smollm2):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    prompt = tokenizer("ab ab cd ab cd cd ab ab")["input_ids"]
    batch = [
        {"prompt": prompt, "params": {"temperature": 2.0, "max_tokens": 40, "regex": "( ab| cd){12}"}, "repeat": 6},
        {"prompt": prompt, "params": {"temperature": 1.0, "max_tokens": 40, "bad_words": ["ab cd", "cd"]}, "repeat": 6},
    ]
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    result = texts(smollm2, [batch], ngram, dtype="bfloat16")
    assert result["accepted"] > 0
    written = [tokenizer.decode(completion["tokens"], skip_special_tokens=True) for completion in result["batches"][0]]
    for text in written[:6]:
        words = text.split()
        assert len(words) == 12
        assert set(words) <= {"ab", "cd"}
    assert len(set(written[:6])) > 1
    for text in written[6:]:
        assert "cd" not in text


def test_each_process_that_has_the_plug_in_says_so():
    code = "import logging, vllm.plugins as plugins; logging.basicConfig(level=20); plugins.load_general_plugins()"
    switches = {"VLLM_PLUGINS": "specens", "SPECENS_VLLM_RULE": "gumbel"}
    for switch, number in (("1", 1), ("0", 0)):
        variables = os.environ | switches | {"SPECENS_VLLM": switch}
        done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)
        told = (done.stdout + done.stderr).count(
            "specens-kernels verifies drafts, by the rule 'gumbel' where none is set"
        )
        assert told == number
