"""The real models of the driver's tests, and quiet transformers."""

import pytest
import transformers
from driver.conftest import expert, shallow, smollm2, tokenizer

__all__ = ["expert", "quiet", "shallow", "smollm2", "tokenizer"]


@pytest.fixture(autouse=True)
def quiet():
    """Without its advice, such as on a config beside its fields: assistants are called so by transformers itself."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(verbosity)
