"""Computations on shards as generators: what a rank tells all others is yielded, what all have told comes back.

So what is computed knows no process and no network; several run side by side in the same collectives, and a test runs
all ranks of a group in one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")
# Yields float64 [batch, numbers], gets [ranks, batch, numbers] in the order of the shards, whatever that of ranks is.
Steps = Generator[Tensor, Tensor, Result]


def together(*parts: Steps[Any]) -> Steps[list[Any]]:
    """Run computations side by side; the results of all. One that ends early leaves the collectives to the others."""
    results: list[Any] = [None] * len(parts)
    told: dict[int, Tensor] = {}

    def advance(index: int, heard: Tensor | None) -> None:
        try:
            told[index] = next(parts[index]) if heard is None else parts[index].send(heard)
        except StopIteration as end:
            told.pop(index, None)
            results[index] = end.value

    for index in range(len(parts)):
        advance(index, None)
    while told:
        indices = list(told)
        widths = [told[index].shape[1] for index in indices]
        heard = yield torch.cat([told[index] for index in indices], 1)
        for index, own in zip(indices, heard.split(widths, 2)):
            advance(index, own)
    return results


def run(steps: Steps[Result], exchange: Callable[[Tensor], Tensor]) -> Result:
    """Run a computation. exchange: float64 [batch, numbers] of this rank to [ranks, batch, numbers] of all."""
    try:
        told = next(steps)
        while True:
            told = steps.send(exchange(told))
    except StopIteration as end:
        result: Result = end.value
        return result
