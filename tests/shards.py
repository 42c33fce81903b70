"""Rows cut into shards, and all ranks of a group in one thread: each computes up to where it tells the others."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

POISON = float("nan")  # of the padding after a vocabulary


class Told(NamedTuple):
    """What was told: collectives, and the bytes that a rank told in each."""

    collectives: int
    sizes: list[int]


def in_lockstep(ranks: Sequence[Any], order: Sequence[int]) -> tuple[list[Any], Told]:
    """Run the ranks' computations; what all have told comes in the order of the shards, whatever that of ranks is."""
    results, waiting, sizes = [None] * len(ranks), list(range(len(ranks))), []
    heard: Tensor | None = None
    while waiting:
        told = {}
        for rank in order:
            try:
                told[rank] = next(ranks[rank]) if heard is None else ranks[rank].send(heard)
            except StopIteration as end:
                results[rank] = end.value
        assert len(told) in (0, len(ranks)), "some ranks wait for others that are done"
        waiting = list(told)
        if waiting:
            heard = torch.stack([told[rank] for rank in range(len(ranks))])
            sizes.append(told[0].numel() * told[0].element_size())
    return results, Told(len(sizes), sizes)


def bounds_of(vocab: int, ranks: int, choice: random.Random) -> list[int]:
    """Where shards begin and end: even, uneven or empty ones."""
    if choice.random() < 0.3:
        return [min(rank * -(-vocab // ranks), vocab) for rank in range(ranks)] + [vocab]
    return [0, *sorted(choice.randint(0, vocab) for _ in range(ranks - 1)), vocab]


def slice_of(values: Tensor, begin: int, end: int, last: bool) -> Tensor:
    """A shard; the last one has padding after it."""
    own = values[..., begin:end]
    return torch.nn.functional.pad(own, (0, 3), value=POISON) if last else own


def on_shards(
    computation: Callable[..., Any],
    logits: Sequence[Tensor],
    *given: Any,
    bounds: Sequence[int],
    order: Sequence[int] | None = None,
    **arguments: Any,
) -> tuple[list[Any], Told]:
    """The results of all ranks. computation: one of `specens_kernels.distributed.operations`."""
    ranks = len(bounds) - 1
    outside = arguments.get("draft_logits")
    computations = []
    for rank in range(ranks):
        index = (bounds[rank], bounds[rank + 1], rank == ranks - 1)
        own = dict(arguments)
        if outside is not None:
            own |= {"draft_logits": slice_of(outside, *index), "draft_vocab_size": outside.shape[-1]}
        own |= {"vocab_start": index[0], "vocab_size": [values.shape[-1] for values in logits]}
        computations.append(computation([slice_of(values, *index) for values in logits], *given, **own))
    return in_lockstep(computations, range(ranks) if order is None else order)


def widest(logits: Sequence[Tensor], arguments: dict[str, Any]) -> int:
    outside = arguments.get("draft_logits")
    return max(values.shape[-1] for values in (*logits, *([] if outside is None else [outside])))


def assert_alike(results: Sequence[Any]) -> None:
    """Every rank has the bits of the first."""
    for result in results[1:]:
        for name, own, first in zip(result._fields, result, results[0]):
            assert (own is None and first is None) or torch.equal(own, first), name
