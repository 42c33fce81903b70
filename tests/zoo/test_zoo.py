"""Every causal LM architecture of the installed transformers: the text of `generate`, or a reason before any text."""

import pytest
from cases import FULL

from zoo.outcomes import EQUAL, outcomes
from zoo.overrides import NOT_BUILT
from zoo.tiny import MODEL_TYPES, tiny_model

# One of each kind: rotary, learned, ALiBi, sliding windows, chunks, recurrent, hybrid, latent attention and experts,
# masks of its own, no cache at all.
QUICK = (
    "gpt2",
    "bloom",
    "gemma3_text",
    "llama4_text",
    "gpt_neo",
    "mamba2",
    "bamba",
    "deepseek_v3",
    "openai-gpt",
    "roberta",
)


@pytest.mark.parametrize("model_type", [kind for kind in MODEL_TYPES if kind not in NOT_BUILT] if FULL else QUICK)
def test_greedy_texts_are_those_of_generate_or_refused(model_type):
    found = outcomes(tiny_model(model_type))
    wrong = {name: outcome for name, outcome in found.items() if outcome.startswith("wrong")}
    assert not wrong
    assert FULL or set(found.values()) == {EQUAL}


@pytest.mark.parametrize("model_type", list(NOT_BUILT)[: None if FULL else 1])
def test_what_is_listed_as_not_built_cannot_be_built(model_type):
    with pytest.raises(Exception):  # noqa: B017, PT011, whatever its configuration fails with
        tiny_model(model_type)


@pytest.mark.parametrize("model_type", ["xlnet", "prophetnet", "gemma4_assistant"])
def test_a_model_that_does_not_continue_a_text_is_refused_with_the_reason(model_type):
    for outcome in outcomes(tiny_model(model_type), ("standard", "tree")).values():
        assert outcome.startswith("refused: members: expected a model that")
