"""What an engine gives, which may be anybody's: checked, so that a mistake is named where it is made."""

from __future__ import annotations

from collections.abc import Sequence, Set
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from specens.engines.protocol import Context, Engine, Needs, Read, Text
from specens_kernels.checks import LOGIT_DTYPES


def check_engine(engine: Engine, argument: str) -> None:
    """Raise ValueError naming the argument where what an engine says of itself is not as `Engine` says."""
    who = f"{argument}: expected an engine with"
    vocab_size, most, ends = (getattr(engine, name, None) for name in ("vocab_size", "max_length", "end_tokens"))
    if not isinstance(vocab_size, int):
        raise ValueError(f"{who} an integer vocab_size, got {engine!r} with {vocab_size!r}")
    if not isinstance(most, int | None):
        raise ValueError(f"{who} an integer max_length or None, got {engine!r} with {most!r}")
    if not isinstance(ends, Set):
        raise ValueError(f"{who} a set of ids as end_tokens, got {engine!r} with {ends!r}")


def open_context(engine: Engine, needs: Needs) -> Context:
    """A context of an engine's. Raises ValueError where it gives none."""
    context = engine.open(needs)
    if not isinstance(context, Context):
        raise ValueError(f"open: expected a Context from {type(engine).__name__}, got {context!r}")
    return context


def add_text(context: Context, prompt: list[int]) -> Text:
    """A new text of a context's. Raises ValueError where it gives none."""
    text = context.add(prompt)
    if not isinstance(text, Text):
        raise ValueError(f"add: expected a Text from {type(context).__name__}, got {text!r}")
    return text


def read_logits(context: Context, reads: Sequence[Read]) -> list[Tensor]:
    """What a context reads. Raises ValueError where it is not as `Context.read` and `Context.hidden` say."""
    logits = context.read(reads)
    dtype, device, width = context.kind or (None, None, None)
    listed = logits if type(logits) is list and context.hidden is None else ()
    for rows, read in zip_longest(listed, reads):  # comparisons tell those of the kind of all before
        is_right = read is not None and type(rows) is Tensor and rows.shape == (read.num_rows, width)
        if not is_right or rows.dtype != dtype or rows.device != device or rows.stride(1) != 1:
            _check(context, logits, reads)
            break
    return logits


def _check(context: Context, logits: Any, reads: Sequence[Read]) -> None:
    _check_rows(context, "read", logits, reads, "logits [rows, vocab]")
    if context.hidden is not None:
        _check_rows(context, "hidden", context.hidden, reads, "hidden states [rows, width]")
    for rows in logits:
        kind = rows.dtype, rows.device, rows.shape[1]
        if kind[0] not in LOGIT_DTYPES:
            raise _wrong(context, "read", "logits in float32, bfloat16 or float16", kind[0])
        context.kind = context.kind or kind
        if kind != context.kind:
            raise _wrong(context, "read", f"logits of one kind, {_kind(context.kind)},", _kind(kind))
        if rows.stride(1) != 1:
            raise _wrong(context, "read", "logits with a contiguous vocabulary", f"a stride of {rows.stride(1)}")


def _check_rows(context: Context, name: str, values: Any, reads: Sequence[Read], what: str) -> None:
    listed = isinstance(values, Sequence)
    if not listed or not all(isinstance(value, Tensor) for value in values):
        kinds = f" of {[type(value).__name__ for value in values]}" if listed else ""
        raise _wrong(context, name, f"a list of tensors of {what}, one for each text,", type(values).__name__ + kinds)
    shapes, num_rows = [list(rows.shape) for rows in values], [read.num_rows for read in reads]
    if [(*shape[:-1], shape[-1:] > [0]) for shape in shapes] != [(rows, True) for rows in num_rows]:
        raise _wrong(context, name, f"{num_rows} rows of {what}", shapes)


def _wrong(context: Context, name: str, expected: str, got: object) -> ValueError:
    return ValueError(f"{name}: expected {expected} from {type(context).__name__}, got {got}")


def _kind(kind: tuple[torch.dtype, torch.device, int]) -> str:
    return f"{kind[0]} on {kind[1]} of {kind[2]} tokens"
