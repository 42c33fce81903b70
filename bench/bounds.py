"""What an operation's time is held against: the cheapest pass over the same bytes."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bench.case import Run


def reading(logits: list[Tensor]) -> dict[str, Run]:
    """torch.amax over all logits; in half precision, where amax is slower than memory, torch.sum beside it."""

    def largest() -> None:
        for values in logits:
            torch.amax(values)

    def total() -> None:
        for values in logits:
            torch.sum(values)

    return {"amax": largest} if logits[0].dtype == torch.float32 else {"amax": largest, "sum": total}


def copying(logits: list[Tensor]) -> dict[str, Run]:
    """Reading all logits and writing one float32 a token of the first member."""

    def copy() -> None:
        for values in logits[1:]:
            torch.amax(values)
        torch.empty(logits[0].shape, dtype=torch.float32).copy_(logits[0])

    return {"read, write": copy}


def adding(first: Tensor, second: Tensor) -> dict[str, Run]:
    return {"add": lambda: torch.add(first, second)}


def filling(like: Tensor) -> dict[str, Run]:
    """Writing a new tensor of the same size."""
    return {"zeros": lambda: torch.zeros(like.shape, dtype=like.dtype)}


def copying_arrays(arrays: list[NDArray[np.integer]]) -> dict[str, Run]:
    """NumPy's own copies of the arrays."""
    return {"copies": lambda: [array.copy() for array in arrays]}
