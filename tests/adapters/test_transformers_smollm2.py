"""transformers on real models, in float32: SmolLM2-135M-Instruct and the demo's expert."""

import torch
from specens import SpeculativeEnsemble
from specens.adapters.transformers import enable, speculative_ensemble
from transformers import StopStringCriteria

from specens_kernels import Mixture, Sampling

QUESTION = "Explain what a Python decorator is."
TOKENS = 16


def prompt(tokenizer):
    messages = [{"role": "user", "content": QUESTION}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False, return_tensors="pt")


def test_greedy_assisted_texts_are_those_of_plain_greedy(smollm2, expert, tokenizer):
    inputs = prompt(tokenizer)
    settings = {"max_new_tokens": TOKENS, "do_sample": False}
    expected = smollm2.generate(**inputs, **settings)
    with enable():
        for source in ({"assistant_model": expert}, {"prompt_lookup_num_tokens": 4}):
            assert torch.equal(smollm2.generate(**inputs, **settings, **source), expected)


def test_the_greedy_text_of_an_ensemble_is_that_of_its_members_in_step(smollm2, expert, tokenizer):
    inputs = prompt(tokenizer)
    weights = Mixture((0.5, 0.5))
    text = smollm2.generate(
        **inputs,
        max_new_tokens=TOKENS,
        do_sample=False,
        custom_generate=speculative_ensemble,
        members=[expert],
        ensemble=weights,
    )
    decoder = SpeculativeEnsemble([smollm2, expert], tokenizer, weights, schedule="standard")
    expected = decoder.generate(QUESTION, chat=True, max_new_tokens=TOKENS, sampling=Sampling(temperature=0.0))
    assert text[0, inputs["input_ids"].shape[1] :].tolist() == expected.tokens


def test_the_text_of_an_ensemble_ends_with_a_stop_string(smollm2, expert, tokenizer):
    inputs = prompt(tokenizer)
    text = smollm2.generate(
        **inputs,
        max_new_tokens=TOKENS,
        do_sample=False,
        custom_generate=speculative_ensemble,
        members=[expert],
        stopping_criteria=[StopStringCriteria(tokenizer, "ecorator")],
    )
    written = tokenizer.decode(text[0, inputs["input_ids"].shape[1] :])
    assert written.count("ecorator") == 1
    assert written.endswith("ecorator")
