"""What an operation's bench file declares: cases, each with its operation, what bounds it, its rivals and its check."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Run = Callable[[], Any]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
QUICK_ELEMENTS = 100_000  # product of the sizes of the largest case of a quick run


@dataclass(frozen=True)
class Options:
    """What the command line asked for. peers: time every peer, also those that no claim names."""

    backend: str
    dtypes: tuple[str, ...]
    peers: bool
    quick: bool


@dataclass(frozen=True)
class Rival:
    """Another way to the same result.

    checked: whether `run` returns what `Case.check` takes; False where it draws random numbers of its own.
    fault: what is known to be wrong with its results.
    """

    run: Run
    checked: bool
    fault: str | None = None


@dataclass(frozen=True)
class Bars:
    """Limits, each None where there is no bar.

    ratio: at most so many times as long as the first bound. seconds: at most so long a call. speedup: at least so many
    times as fast as the fastest of the rivals named in `over`.
    """

    ratio: float | None = None
    seconds: float | None = None
    speedup: float | None = None
    over: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    """One row of a table.

    shape: sizes by name. setting: what else describes the case, by name. dtype: of the logits, or "-".
    run: the operation. result: the part of what it returns that is checked. check: returns the number of near ties in
    it, raises WrongResultError. bounds: what to hold the operation against, by name; ratios are to the first.
    bytes_needed: what any implementation must read and write. bars: what the operation should reach.
    table: the title of the table that it is a row of, where an operation has several.
    """

    shape: dict[str, int]
    setting: dict[str, Any]
    dtype: str
    run: Run
    result: Callable[[Any], Tensor]
    check: Callable[[Tensor], int]
    bounds: dict[str, Run]
    bytes_needed: int
    rivals: dict[str, Rival]
    bars: Bars = Bars()
    table: str = ""


def chosen_shapes(options: Options, shapes: tuple[tuple[int, ...], ...]) -> list[tuple[int, ...]]:
    """The shapes to measure: all, or those that are small."""
    return [shape for shape in shapes if not options.quick or math.prod(shape) <= QUICK_ELEMENTS]
