"""Distributions after the sampling parameters, in plain PyTorch: inputs are drawn from them, rivals build on them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from specens_kernels import Sampling

Select = Callable[[Tensor, int], tuple[Tensor, Tensor]]

TIES = 14  # tokens beyond the k-th that may tie with it: bfloat16 logits often do


def kept_tokens(logits: Tensor, sampling: Sampling, select: Select = torch.topk) -> tuple[Tensor, Tensor]:
    """Probabilities after top-k and top-p, float32, and ids, both [..., tokens] from the most probable one down.

    logits: [..., vocab]. sampling: with numbers for temperature, top_k and top_p. tokens: top_k and some that may tie
    with the last; those that a filter drops have probability 0. select: as torch.topk.
    """
    assert isinstance(sampling.top_k, int)
    assert isinstance(sampling.top_p, float)
    vocab = logits.shape[-1]
    top_k = min(sampling.top_k, vocab)
    values, ids = select(logits, min(top_k + TIES, vocab))
    values = values.float() / sampling.temperature
    values = values.masked_fill(values < values[..., top_k - 1 : top_k], -math.inf)
    probabilities = values.softmax(-1)
    mass_before = probabilities.cumsum(-1) - probabilities
    last = values.masked_fill(mass_before >= sampling.top_p, math.inf).amin(-1, keepdim=True)
    probabilities = torch.where(values >= last, probabilities, 0.0)
    return probabilities / probabilities.sum(-1, keepdim=True), ids


def distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    """Dense float32 probabilities [..., vocab]; the filters are top_k with top_p, or none."""
    if not sampling.filters:
        return (logits.float() / sampling.temperature).softmax(-1)
    probabilities, ids = kept_tokens(logits, sampling)
    return torch.zeros(logits.shape).scatter_(-1, ids, probabilities)
