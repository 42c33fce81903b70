"""What a single value of the public API must be like: numbers, integers, and tensors with one a request."""

from __future__ import annotations

import math
import numbers
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

INTEGER_DTYPES = (torch.int64, torch.int32)


def fail(argument: str, expected: str, got: object) -> NoReturn:
    raise ValueError(f"{argument}: expected {expected}, got {got}")


class Range(NamedTuple):
    """The real numbers from `least` to `most`, infinities never; above: without `least` itself."""

    least: float = -math.inf
    most: float = math.inf
    above: bool = False

    def __str__(self) -> str:
        if self.most < math.inf:
            return f"{'(' if self.above else '['}{self.least:g}, {self.most:g}]"
        return "" if self.least == -math.inf else f"{'>' if self.above else '>='} {self.least:g}"

    @property
    def expected(self) -> str:
        """How an error names it."""
        if self.most < math.inf:
            return f"a number in {self}"
        return f"a finite number {self}".rstrip()

    def holds(self, value: Any) -> Any:
        """Whether a number is in it, or each of a tensor."""
        above = value > self.least if self.above or self.least == -math.inf else value >= self.least
        return above & (value <= self.most if self.most < math.inf else value < math.inf)


def readable(value: object) -> bool:
    """Whether looking at the numbers of a tensor costs no device synchronisation and no graph break."""
    return isinstance(value, Tensor) and value.device.type == "cpu" and not torch.compiler.is_compiling()


def is_integer(value: object) -> bool:
    """Whether this is an integer that operators take: Python's or NumPy's, of 64 bits, no truth value."""
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt | numbers.Integral):
        return False
    return bool(-(2**63) <= value < 2**63)  # type: ignore[operator]


def is_number(value: object) -> bool:
    """Whether this is a real number, Python's or NumPy's, no truth value."""
    return isinstance(value, int | float | numbers.Real) and not isinstance(value, bool)


def check_number(name: str, value: object, allowed: Range, expected: str | None = None) -> None:
    """Raise ValueError unless this is a number in range."""
    if not is_number(value) or not allowed.holds(value):
        fail(name, expected or allowed.expected, repr(value))


def check_requests(name: str, expected: str, values: Tensor, right: Tensor) -> None:
    """Raise ValueError that tells the first of the numbers [batch], or rows of numbers, that are not right."""
    if not bool(right.all()):
        request = int(right.flatten(1).all(1).int().argmin() if right.dim() > 1 else right.int().argmin())
        fail(name, expected, f"{values[request].tolist()} for request {request}")


def check_numbers(name: str, value: Any, allowed: Range) -> None:
    """Raise ValueError unless a number, or each number of a tensor [batch], is in range."""
    if not isinstance(value, Tensor):
        check_number(name, value, allowed)
        return
    if value.dim() != 1 or not value.is_floating_point():
        fail(name, f"{allowed.expected} or a floating-point tensor [batch]", f"{value.dtype} {list(value.shape)}")
    if readable(value):
        check_requests(name, f"{allowed.expected} for each request", value, allowed.holds(value))


def check_integer_rows(name: str, value: object, least: float = -math.inf) -> None:
    """Raise ValueError unless an integer, or each of a tensor [batch], is at least this."""
    expected = "an integer of 64 bits" if least == -math.inf else f"an integer from {least} to 2**63 - 1"
    if isinstance(value, Tensor):
        if value.dim() != 1 or value.dtype not in INTEGER_DTYPES:
            got = f"{value.dtype} {list(value.shape)}"
            fail(name, f"{expected} or an int64 or int32 tensor [batch]", got)
        if readable(value):
            check_requests(name, f"{expected} for each request", value, value >= least)
    elif not is_integer(value) or value < least:  # type: ignore[operator]
        fail(name, expected, repr(value))
