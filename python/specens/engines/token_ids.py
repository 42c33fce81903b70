"""The token ids of a text that grows, without reading them anew for each token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class TokenIds:
    """A prompt, and after it a sequence: a tensor of which only what is new is written."""

    def __init__(self, prompt: list[int], device: torch.device) -> None:
        self._start = len(prompt)
        self._num_known = 0  # of the sequence
        self._ids = torch.tensor([prompt], dtype=torch.long, device=device)

    def after(self, sequence: Sequence[int]) -> Tensor:
        """Ids [1, tokens], valid until the next call: the sequence goes on from what it was, see `forget`."""
        held, first, end = self._ids.shape[1], self._start + self._num_known, self._start + len(sequence)
        if end > held:
            self._ids = torch.nn.functional.pad(self._ids, (0, max(end, 2 * held) - held))
        if end > first:
            self._ids[:, first:end] = torch.tensor(sequence[self._num_known :], device=self._ids.device)
            self._num_known = len(sequence)
        return self._ids[:, :end]

    def forget(self, length: int) -> None:
        """The tokens after the first `length` of the sequence will be others."""
        self._num_known = min(self._num_known, length)
