"""Every causal LM architecture of the installed transformers: the text of `generate`, or a reason before any text."""

import pytest
from cases import FULL

from zoo.outcomes import EQUAL, outcomes
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


@pytest.mark.parametrize("model_type", MODEL_TYPES if FULL else QUICK)
def test_greedy_texts_are_those_of_generate_or_refused(model_type):
    found = outcomes(tiny_model(model_type))
    wrong = {name: outcome for name, outcome in found.items() if outcome.startswith("wrong")}
    assert not wrong
    assert FULL or set(found.values()) == {EQUAL}
