"""Which of the logits processors of a generation are sampling parameters of a verification."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import LogitsProcessor, MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from specens_kernels import Sampling, target_logprobs

FOLDABLE = {  # in the order in which they must come
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
    MinPLogitsWarper: "min_p",
}


class Filters(LogitsProcessor):
    """Temperature and filters in one pass that sorts nothing; scores become log-probabilities."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # noqa: ARG002
        """Of scores [batch, vocab], float32 of the same shape, -inf where a filter drops a token."""
        return target_logprobs(scores, sampling=self.sampling)


def in_one_pass(processors: Sequence[Any]) -> list[Any]:
    """The same processors, those that end the list as `Filters` where they are more than none."""
    others, sampling = split_processors(processors)
    return [*others, Filters(sampling)] if len(others) < len(processors) else others


def split_processors(processors: Sequence[Any]) -> tuple[list[Any], Sampling]:
    """The processors that must run by themselves, and the sampling parameters that do what those after them do.

    A processor sees what the one before it left, so only the end of the list can become sampling parameters:
    temperature, top-k, top-p, min-p, each at most once, in this order and with their default settings.
    """
    parameters: dict[str, Any] = {}
    indices = list(FOLDABLE.values())
    first = len(processors)
    while first > 0 and _is_foldable(processors[first - 1]):
        name = FOLDABLE[type(processors[first - 1])]
        if name not in indices:
            break
        parameters[name] = getattr(processors[first - 1], name)
        indices = indices[: indices.index(name)]
        first -= 1
    return list(processors[:first]), Sampling(**parameters)


def _is_foldable(processor: Any) -> bool:
    if type(processor) not in FOLDABLE or getattr(processor, "top_p", 1.0) == 0:
        return False
    return (
        getattr(processor, "filter_value", -math.inf) == -math.inf and getattr(processor, "min_tokens_to_keep", 1) == 1
    )
