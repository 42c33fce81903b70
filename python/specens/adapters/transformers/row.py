"""One text of a batch while it is generated: what its stopping criteria and its streamer see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from specens.decoding.request import Event


class Row:
    """A prompt with its padding, and the tokens after it.

    prompt: [tokens]. criteria: of transformers, called with ids [1, tokens] after every token, without scores.
    streamer: receives the tokens of each round, or None. ended: whether a criterion stopped the text.
    """

    def __init__(self, prompt: Tensor, criteria: Callable[..., Any], streamer: Any | None) -> None:
        self.ids = prompt
        self.ended = False
        self._criteria = criteria
        self._streamer = streamer

    def read(self, events: Sequence[Event]) -> None:
        """Take the tokens of a round, up to the first at which a criterion stops; those after it are dropped."""
        num_before = len(self.ids)
        for event in events:
            if not self.ended:
                self.ids = torch.cat([self.ids, self.ids.new_tensor([event.token])])
                self.ended = bool(self._criteria(self.ids[None], None).any())
        if self._streamer is not None and len(self.ids) > num_before:
            self._streamer.put(self.ids[num_before:].cpu())
