"""Replacing functions of vLLM: all of them, or none."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

INSTALLED = "replaced_by_specens"


class Replacement(NamedTuple):
    """owner.name, a function with these parameters, becomes make(owner.name)."""

    owner: Any
    name: str
    parameters: tuple[str, ...]
    make: Callable[[Callable], Callable]


def replace_all(replacements: Sequence[Replacement]) -> None:
    """Raise RuntimeError if a function is not as expected, before the first is replaced."""
    for owner, name, parameters, _ in replacements:
        found = tuple(inspect.signature(getattr(owner, name)).parameters)
        if found != parameters:
            raise RuntimeError(
                f"vLLM: expected {owner.__name__}.{name} with the parameters {', '.join(parameters)}, "
                f"got {', '.join(found)}"
            )
    for owner, name, _, make in replacements:
        original = getattr(owner, name)
        if not hasattr(original, INSTALLED):
            replaced = functools.wraps(original)(make(original))
            setattr(replaced, INSTALLED, True)
            setattr(owner, name, replaced)
