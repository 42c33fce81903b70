"""The bit masks of the tokens that a grammar allows, at the positions behind the settled tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Constraint = Callable[[list[int]], Tensor | None]

BITS = 32


class Masks:
    """Asks a constraint once for each position, and only where a token can stand.

    constraint: called with the tokens before a position; the mask int32 [words] of the tokens that may stand there, or
        None where the text is complete. It may hand out the same tensor every time. stop_tokens: nothing follows them.
    Raises ValueError where it returns something else.
    """

    def __init__(self, constraint: Constraint, stop_tokens: frozenset[int]) -> None:
        self._constraint = constraint
        self._stop_tokens = stop_tokens
        self._masks: dict[int, Tensor | None] = {}
        self._like: Tensor | None = None

    def at(self, position: int, sequence: Sequence[int], num_settled: int) -> Tensor | None:
        """The mask at a position from `num_settled` on; None where nothing follows the token before it in `sequence`.

        That is an end, or a draft that the constraint excludes or that is not asked about for the same reason.
        """
        if position not in self._masks:
            reachable = position == num_settled or self._goes_on(position - 1, sequence, num_settled)
            self._masks[position] = self._ask(list(sequence[:position])) if reachable else None
        return self._masks[position]

    def allows(self, position: int, sequence: Sequence[int], num_settled: int) -> bool:
        """Whether the token of `sequence` at a position may stand there."""
        token, mask = sequence[position], self.at(position, sequence, num_settled)
        return mask is not None and token < BITS * len(mask) and bool(int(mask[token // BITS]) >> token % BITS & 1)

    @property
    def all_tokens(self) -> Tensor:
        """A mask that excludes nothing, once there has been another one."""
        assert self._like is not None
        return torch.full_like(self._like, -1)

    def keep(self, position: int) -> None:
        """Forget the masks at all positions but one: the tokens behind it are other ones now."""
        self._masks = {place: mask for place, mask in self._masks.items() if place == position}

    def _goes_on(self, position: int, sequence: Sequence[int], num_settled: int) -> bool:
        """Whether a token may stand behind the draft at a position."""
        return sequence[position] not in self._stop_tokens and self.allows(position, sequence, num_settled)

    def _ask(self, tokens: list[int]) -> Tensor | None:
        mask = self._constraint(tokens)
        if mask is None:
            return None
        if not isinstance(mask, Tensor) or mask.dtype != torch.int32 or mask.dim() != 1:
            got = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, Tensor) else repr(mask)
            raise ValueError(f"constraint: expected it to return an int32 tensor [words] or None, got {got}")
        if self._like is not None and len(mask) != len(self._like):
            raise ValueError(f"constraint: expected {len(self._like)} words as before, got {len(mask)}")
        self._like = mask.clone()
        return self._like
