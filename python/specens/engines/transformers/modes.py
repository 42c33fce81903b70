"""Members compute in eval mode, and have the mode that they came in again afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specens.engines.transformers.causal_lm import CausalLM


@contextmanager
def evaluating(models: Iterable[CausalLM]) -> Iterator[None]:
    """Put models into eval mode for a while; each of their modules that was in train mode is in it again behind."""
    models = list(models)
    training = [module for model in models for module in model.model.modules() if module.training]
    for model in models:
        model.model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
