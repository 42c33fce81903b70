"""Grammars that a text must follow: JSON schemas, regular expressions and Lark grammars, read by llguidance."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from specens.decoding.masks import BITS, Constraint

INSTALL = "pip install 'specens-kernels[grammar]'"
KINDS = ("json_schema", "regex", "lark")
COMPACT = {"defaults": {"whitespace_flexible": False}}  # else a small model may write spaces without an end

_tokenizers: WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = WeakKeyDictionary()  # a second each to make


@dataclass(frozen=True)
class Grammar:
    """What a text must be, from its first token to its last.

    kind: "json_schema", "regex" or "lark", llguidance's dialect of Lark. text: the schema as JSON, or the expression.
    Raises ValueError where the kind is none of these.
    """

    kind: str
    text: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"grammar: expected a kind of {', '.join(KINDS)}, got {self.kind!r}")
        if not isinstance(self.text, str):
            raise ValueError(f"grammar: expected the text of a {self.kind}, got {type(self.text).__name__}")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str | type) -> Grammar:
        """One value that suits a JSON schema: a dict, its text, or a class of pydantic.

        It is written in one line, unless the schema's own "x-guidance" says {"whitespace_flexible": true}.

        Raises ValueError where it is none of these, or no JSON.
        """
        if hasattr(schema, "model_json_schema"):
            schema = schema.model_json_schema()
        try:
            value = json.loads(schema) if isinstance(schema, str) else schema
            text = json.dumps(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"grammar: expected a JSON schema, got {schema!r} ({error})") from error
        if not isinstance(value, Mapping | bool):
            raise ValueError(f"grammar: expected a JSON schema, which is an object, got {type(value).__name__}")
        return cls("json_schema", text)


def constraint_of(settings: Mapping[str, Any], tokenizer: Any, stop_tokens: frozenset[int]) -> Constraint | None:
    """The constraint of a text: that of its settings, or one that asks its grammar.

    Raises ValueError where both are given, the grammar is not one, or this tokenizer cannot be used with it.
    """
    constraint, grammar = settings.get("constraint"), settings.get("grammar")
    if constraint is not None and not callable(constraint):
        raise ValueError(f"constraint: expected a function of token ids, got {type(constraint).__name__}")
    if grammar is None:
        return constraint
    if constraint is not None:
        raise ValueError("grammar: expected none beside constraint")
    if not isinstance(grammar, Grammar):
        if not isinstance(grammar, Mapping) and not hasattr(grammar, "model_json_schema"):
            got = type(grammar).__name__
            raise ValueError(f"grammar: expected a Grammar, a JSON schema as a dict, or a class of pydantic, got {got}")
        grammar = Grammar.json_schema(grammar)
    return Matcher(grammar, tokenizer, stop_tokens)


class Matcher:
    """The constraint of one text, whose state follows the tokens that it is asked about, also back and aside.

    Raises ValueError where llguidance cannot read the grammar or the tokenizer.
    """

    def __init__(self, grammar: Grammar, tokenizer: Any, stop_tokens: Sequence[int] | frozenset[int]) -> None:
        try:
            import llguidance
        except ImportError:
            raise ValueError(f"grammar: expected the package llguidance to be installed, {INSTALL}") from None
        known = _read(tokenizer, tuple(sorted(stop_tokens)))
        make = getattr(llguidance.LLMatcher, f"grammar_from_{grammar.kind}")
        try:
            text = make(grammar.text, **(COMPACT if grammar.kind == "json_schema" else {}))
            problem = llguidance.LLMatcher.validate_grammar(text, known)
        except ValueError as error:
            problem = str(error)
        if problem:
            raise ValueError(f"grammar: expected a {grammar.kind} that llguidance reads: {problem}")
        self._matcher = llguidance.LLMatcher(known, text)
        self._tokens: list[int] = []
        self._mask = torch.empty((known.vocab_size + BITS - 1) // BITS, dtype=torch.int32)

    def __call__(self, tokens: list[int]) -> Tensor | None:
        """The mask of the tokens that may come next; None where the text is complete."""
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self._tokens, tokens)))
        if common < len(self._tokens):
            self._checked(self._matcher.rollback(len(self._tokens) - common))
        if common < len(tokens):
            self._checked(self._matcher.consume_tokens(tokens[common:]))
        self._tokens = list(tokens)
        if self._matcher.is_stopped():
            return None
        self._matcher.unsafe_compute_mask_ptr(self._mask.data_ptr(), self._mask.numel() * self._mask.element_size())
        self._checked(not self._matcher.is_error())
        return self._mask

    def _checked(self, done: bool) -> None:
        if not done:
            raise ValueError(f"grammar: llguidance stopped: {self._matcher.get_error()}")


def _read(tokenizer: Any, ends: tuple[int, ...]) -> Any:
    """llguidance's view of a tokenizer, made once for each set of ends."""
    from llguidance.hf import from_tokenizer

    made = _tokenizers.setdefault(tokenizer, {}) if tokenizer is not None else {}
    if ends not in made:
        try:
            made[ends] = from_tokenizer(tokenizer, eos_token=list(ends) or None)
        except (AttributeError, TypeError, ValueError) as error:
            got = type(tokenizer).__name__
            raise ValueError(
                f"grammar: expected a fast tokenizer that llguidance reads, got {got} ({error})"
            ) from error
    return made[ends]
