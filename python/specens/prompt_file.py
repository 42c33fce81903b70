"""A file of prompts: JSON lines, each a prompt with settings of its own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specens.json_lines import parse_lines
from specens.prompts import MemberPrompts
from specens.request import Ensemble
from specens_kernels import LogitMixture, Mixture, Sampling

SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p")
_FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "prompt": ("text, token ids or chat messages", lambda value: isinstance(value, str | list)),
    "id": ("a text or an integer", lambda value: isinstance(value, str | int)),
    "seed": ("an integer of 64 bits", lambda value: isinstance(value, int) and -(2**63) <= value < 2**63),
    "max_new_tokens": ("an integer", lambda value: isinstance(value, int)),
    "temperature": ("a number", lambda value: isinstance(value, int | float)),
    "top_k": ("an integer", lambda value: isinstance(value, int)),
    "top_p": ("a number", lambda value: isinstance(value, int | float)),
    "min_p": ("a number", lambda value: isinstance(value, int | float)),
    "weights": (
        "a list of numbers",
        lambda value: isinstance(value, list) and all(isinstance(weight, int | float) for weight in value),
    ),
    "member_prompts": ("a list with a prompt for each member", lambda value: isinstance(value, list)),
}


@dataclass(frozen=True)
class PromptLine:
    """A prompt of a file; `values` are its fields, those that are null left out. where: how errors name it."""

    values: dict[str, Any]
    where: str

    @property
    def prompt(self) -> Any:
        """Text, token ids or chat messages, or one of these for each member."""
        each = self.values.get("member_prompts")
        return self.values["prompt"] if each is None else MemberPrompts(each)

    def sampling(self, others: Sampling) -> Sampling:
        """The sampling of all prompts, and in its place what this line says."""
        return replace(others, **{name: self.values[name] for name in SAMPLING_FIELDS if name in self.values})

    def ensemble(self, others: Ensemble | None) -> Ensemble | None:
        """The ensemble of all prompts with the weights of this line; None where it has none of its own."""
        weights = self.values.get("weights")
        if weights is None:
            return None
        if others is None:
            return Mixture(weights)
        if not isinstance(others, Mixture | LogitMixture):
            raise ValueError(f"weights: expected none beside an ensemble of kind {type(others).__name__}")
        return replace(others, weights=tuple(map(float, weights)))


def read_prompts(path: Path) -> list[PromptLine]:
    """The lines of a file, blank ones aside.

    Fields: prompt, or member_prompts with one for each member; and perhaps id, seed, max_new_tokens, temperature,
    top_k, top_p, min_p, weights.
    Raises ValueError naming the line, what was expected in it and what came.
    """
    lines = [PromptLine(_checked(path, number, values), f"{path}, prompt {number}") for number, values in _read(path)]
    if not lines:
        raise ValueError(f"{path}: expected a prompt on each line, got none")
    return lines


def digest(lines: Sequence[PromptLine]) -> str:
    """What tells these prompts from others."""
    text = json.dumps([line.values for line in lines], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _read(path: Path) -> list[tuple[int, dict]]:
    return list(enumerate(parse_lines(path, path.read_bytes()), start=1))


def _checked(path: Path, number: int, values: dict) -> dict:
    where = f"{path}, prompt {number}"
    unknown = sorted(set(values) - set(_FIELDS))
    if unknown:
        raise ValueError(f"{where}: expected the fields {', '.join(_FIELDS)}; got {unknown[0]!r}")
    given = {name: value for name, value in values.items() if value is not None}
    if ("prompt" in given) == ("member_prompts" in given):
        raise ValueError(
            f"{where}: expected a field 'prompt' or 'member_prompts', got {', '.join(map(repr, values)) or 'no field'}"
        )
    for name, value in given.items():
        expected, suits = _FIELDS[name]
        if isinstance(value, bool) or not suits(value):
            raise ValueError(f"{where}: {name}: expected {expected}, got {value!r}")
    return given
