"""The filtered operation of `compiled_pytorch` with a topk over the maxima of chunks before that over tokens.

No bar names it: it shows what there is to gain in PyTorch by writing more than topk.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.case import Rival
from bench.peers import plain_pytorch
from bench.peers.compiled_pytorch import compiled

CHUNK = 64


def largest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """As torch.topk, but for which of equal values it returns."""
    vocab = logits.shape[-1]
    if vocab % CHUNK or vocab < 2 * count * CHUNK:
        return logits.topk(count)
    chunks = logits.unflatten(-1, (vocab // CHUNK, CHUNK)).amax(-1).topk(count).indices
    candidates = (chunks[..., None] * CHUNK + torch.arange(CHUNK, device=logits.device)).flatten(-2)
    values, index = logits.gather(-1, candidates).topk(count)
    return values, candidates.gather(-1, index)


def verify_chain(inputs: Any) -> Rival | None:
    """None without filters: there is no topk."""
    if not inputs.sampling.filters:
        return None
    return plain_pytorch.verify_chain(inputs, lambda function: compiled(partial(function, select=largest)))
