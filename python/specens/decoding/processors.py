"""Logits processors: which can be called for any position again and again, as speculation does, and the call itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

LogitsProcessor = Callable[[Tensor, Tensor], Tensor]

AUDIO = "it edits the channels of an audio codec, not rows of one text"
REFUSED = {  # of transformers, by name and with the reason
    "ClassifierFreeGuidanceLogitsProcessor": "it takes two rows for each text; LogitMixture((w, 1 - w)) guides",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "it keeps a cache that grows with every call; "
    "LogitMixture((w, 1 - w)) with a prompt for each member guides",
    "SynthIDTextWatermarkLogitsProcessor": "it remembers the contexts of every call",
    "WhisperNoSpeechDetection": "it keeps a probability of its first call, and reads audio",
    "DiaClassifierFreeGuidanceLogitsProcessor": AUDIO,
    "DiaEOSChannelFilterLogitsProcessor": AUDIO,
    "DiaEOSDelayPatternLogitsProcessor": AUDIO,
}


def as_processors(processors: Any) -> tuple[LogitsProcessor, ...]:
    """The processors of a list, those of lists in it among them.

    Raises ValueError where one is no function, or is known to need more than ids and logits of one row.
    """
    if processors is None:
        return ()
    if not isinstance(processors, Sequence) or isinstance(processors, str | bytes):
        raise ValueError(f"logits_processors: expected a list of functions, got {type(processors).__name__}")
    flat: list[LogitsProcessor] = []
    for processor in processors:
        if isinstance(processor, Sequence) and not isinstance(processor, str | bytes):
            flat += as_processors(processor)
            continue
        if not callable(processor):
            raise ValueError(f"logits_processors: expected functions of ids and logits, got {processor!r}")
        name = next((own.__name__ for own in type(processor).__mro__ if own.__name__ in REFUSED), None)
        if name is not None:
            raise ValueError(f"logits_processors: expected none of {name}: {REFUSED[name]}")
        flat.append(processor)
    return tuple(flat)


def process(processors: Sequence[LogitsProcessor], ids: Tensor, row: Tensor, *, is_first: bool) -> Tensor:
    """The float32 logits [1, vocab] that processors make of a row [vocab] after ids [1, tokens], one after the other.

    is_first: whether no token has been generated: then each is called twice, and must say the same.
    Raises ValueError where one does not, or returns something else than logits.
    """
    scores = row[None].to(torch.float32, copy=True)  # processors may write into it
    for processor in processors:
        given = scores.clone() if is_first else None
        scores = processor(ids, scores)
        if not isinstance(scores, Tensor) or scores.shape != (1, len(row)):
            got = list(scores.shape) if isinstance(scores, Tensor) else repr(scores)
            raise ValueError(f"logits_processors: expected logits [1, {len(row)}] from {_name(processor)}, got {got}")
        if given is not None and not torch.equal(scores.nan_to_num(), processor(ids, given).nan_to_num()):
            raise ValueError(
                f"logits_processors: expected functions of ids and logits alone, as drafts that are rejected make them "
                f"see a position again; {_name(processor)} gave other logits when it was called twice"
            )
    return scores


def _name(processor: Any) -> str:
    return getattr(processor, "__name__", type(processor).__name__)
