"""A file of prompts: JSON lines, each a prompt with settings of its own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specens.decoding.request import Ensemble
from specens.files.json_lines import name_of, parse_lines, read_bytes
from specens.settings.prompts import MemberPrompts
from specens_kernels import LogitMixture, Mixture

SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p")
_FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "prompt": ("text, token ids or chat messages", lambda value: isinstance(value, str | list)),
    "id": ("a text or an integer", lambda value: isinstance(value, str | int)),
    "seed": ("an integer of 64 bits", lambda value: isinstance(value, int) and -(2**63) <= value < 2**63),
    "max_new_tokens": ("an integer", lambda value: isinstance(value, int)),
    "min_new_tokens": ("an integer", lambda value: isinstance(value, int)),
    "stop": (
        "a text or a list of texts",
        lambda value: (
            isinstance(value, str) or (isinstance(value, list) and all(isinstance(stop, str) for stop in value))
        ),
    ),
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

_MESSAGES: tuple[str, Callable[[Any], bool]] = (
    "a list of messages, each with a role and a content that are texts",
    lambda value: _are_messages(value),
)
_OTHER_NAMES = {  # of OpenAI's chat format
    "messages": "prompt",
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
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

    @property
    def stop_strings(self) -> list[str] | None:
        """What ends its texts; None where it does not say."""
        stop = self.values.get("stop")
        return [stop] if isinstance(stop, str) else stop

    @property
    def parameters(self) -> dict[str, Any]:
        """Sampling parameters of this line, in place of those of all prompts."""
        return {name: self.values[name] for name in SAMPLING_FIELDS if name in self.values}

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

    Fields: prompt, or member_prompts with one for each member; and perhaps id, seed, max_new_tokens, min_new_tokens,
    stop, temperature, top_k, top_p, min_p and weights. The names of OpenAI's chat format do too: messages for prompt,
    max_tokens or max_completion_tokens for max_new_tokens.
    Raises ValueError naming the line, what was expected in it and what came.
    """
    lines = [_checked(f"{name_of(path)}, prompt {number}", values) for number, values in _read(path)]
    if not lines:
        raise ValueError(f"{name_of(path)}: expected a prompt on each line, got none")
    return lines


def digest(lines: Sequence[PromptLine]) -> str:
    """What tells these prompts from others."""
    text = json.dumps([line.values for line in lines], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _read(path: Path) -> list[tuple[int, dict]]:
    return list(enumerate(parse_lines(path, read_bytes(path)), start=1))


def _checked(where: str, values: dict) -> PromptLine:
    unknown = sorted(set(values) - {*_FIELDS, *_OTHER_NAMES})
    if unknown:
        expected = ", ".join([*_FIELDS, *_OTHER_NAMES])
        raise ValueError(f"{where}: expected the fields {expected}; got {', '.join(map(repr, unknown))}")
    given: dict[str, Any] = {}
    for name, value in values.items():
        if value is None:
            continue
        own = _OTHER_NAMES.get(name, name)
        expected, suits = _MESSAGES if name == "messages" else _FIELDS[own]
        if isinstance(value, bool) or not suits(value):
            raise ValueError(f"{where}: {name}: expected {expected}, got {value!r}")
        if own in given:
            raise ValueError(f"{where}: {name}: expected no second field that says {own}")
        given[own] = value
    if ("prompt" in given) == ("member_prompts" in given):
        got = ", ".join(map(repr, values)) or "no field"
        raise ValueError(f"{where}: expected a field 'prompt', 'messages' or 'member_prompts', got {got}")
    return PromptLine(given, where)


def _are_messages(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(isinstance(one, dict) for one in value)
        and all(isinstance(one.get(name), str) for one in value for name in ("role", "content"))
    )
