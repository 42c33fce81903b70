"""The token ids of texts that grow, without reading them anew for each token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class TokenIds:
    """Prompts, and behind each the same sequence: a tensor of which only what is new is written.

    prompts: token ids; shorter ones are padded with 0 in front.
    """

    def __init__(self, prompts: Sequence[list[int]], device: torch.device) -> None:
        self._start = max(map(len, prompts))
        self._num_known = 0  # of the sequence
        padded = [[0] * (self._start - len(prompt)) + prompt for prompt in prompts]
        self._ids = torch.tensor(padded, dtype=torch.long, device=device)

    def behind(self, sequence: list[int]) -> Tensor:
        """Ids [prompts, tokens], valid until the next call: the sequence goes on from what it was, see `forget`."""
        held, first, end = self._ids.shape[1], self._start + self._num_known, self._start + len(sequence)
        if end > held:
            self._ids = torch.nn.functional.pad(self._ids, (0, max(end, 2 * held) - held))
        if end > first:
            self._ids[:, first:end] = torch.tensor(sequence[self._num_known :], device=self._ids.device)
            self._num_known = len(sequence)
        return self._ids[:, :end]

    def forget(self, length: int) -> None:
        """The tokens behind the first `length` of the sequence will be others."""
        self._num_known = min(self._num_known, length)
