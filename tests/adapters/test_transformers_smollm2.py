"""transformers on real models, in float32: SmolLM2-135M-Instruct and the demo's expert, `shallow`."""

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


def text_of(members, inputs, **settings):
    """The greedy text of their even mixture, without its prompt."""
    model, *others = members
    text = model.generate(
        **inputs,
        max_new_tokens=TOKENS,
        do_sample=False,
        custom_generate=speculative_ensemble,
        members=others,
        ensemble=Mixture((0.5, 0.5)),
        **settings,
    )
    return text[0, inputs["input_ids"].shape[1] :].tolist()


def test_greedy_assisted_texts_are_those_of_plain_greedy(shallow, tokenizer):
    model, assistant = shallow
    inputs = prompt(tokenizer)
    settings = {"max_new_tokens": TOKENS, "do_sample": False}
    expected = model.generate(**inputs, **settings)
    with enable():
        for source in ({"assistant_model": assistant}, {"prompt_lookup_num_tokens": 4}):
            assert torch.equal(model.generate(**inputs, **settings, **source), expected)


def test_the_greedy_text_of_an_ensemble_is_that_of_its_members_in_step(shallow, tokenizer):
    decoder = SpeculativeEnsemble(shallow, tokenizer, Mixture((0.5, 0.5)), schedule="standard")
    expected = decoder.generate(QUESTION, chat=True, max_new_tokens=TOKENS, sampling=Sampling(temperature=0.0))
    assert text_of(shallow, prompt(tokenizer)) == expected.tokens


def test_the_text_of_an_ensemble_ends_with_a_stop_string(shallow, tokenizer):
    inputs = prompt(tokenizer)
    whole = text_of(shallow, inputs)
    stop = tokenizer.decode(whole[2]).strip()
    length = next(length for length in range(TOKENS) if stop in tokenizer.decode(whole[:length]))
    assert stop
    assert text_of(shallow, inputs, stopping_criteria=[StopStringCriteria(tokenizer, stop)]) == whole[:length]
