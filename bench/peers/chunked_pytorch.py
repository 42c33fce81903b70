"""The operation of `compiled_pytorch` by chunks: a topk over their maxima before one over tokens, a draw by their sums.

No bar names it: it shows what there is to gain in PyTorch by writing more than topk and cumsum.
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


def draw(masses: Tensor, random_numbers: Tensor) -> Tensor:
    """As of `plain_pytorch`: the chunk by sums of chunks, then the token in it."""
    vocab = masses.shape[-1]
    chunks = torch.nn.functional.pad(masses, (0, -vocab % CHUNK)).unflatten(-1, (-1, CHUNK))
    sums = chunks.sum(-1)
    before = sums.cumsum(-1)
    level = random_numbers.float() * before[:, -1]
    chunk = torch.searchsorted(before, level[:, None], right=True).clamp(max=sums.shape[-1] - 1)  # [batch, 1]
    rest = level[:, None] - (before.gather(-1, chunk) - sums.gather(-1, chunk))
    inside = chunks.take_along_dim(chunk[..., None], 1)[:, 0].cumsum(-1)
    token = torch.searchsorted(inside, rest, right=True).clamp(max=CHUNK - 1)
    return (chunk * CHUNK + token)[:, 0].clamp(max=vocab - 1)


def verify_chain(inputs: Any) -> Rival | None:
    """With filters the topk goes by chunks, without them the draw."""
    by_chunks: dict[str, Any] = {"select": largest} if inputs.sampling.filters else {"draw": draw}
    return plain_pytorch.verify_chain(inputs, lambda function: compiled(partial(function, **by_chunks)))
