"""The bit masks of the tokens that a grammar allows, after the settled tokens and after drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from specens.decoding.request import Request

Constraint = Callable[[list[int]], Tensor | None]

BITS = 32


class Masks:
    """Asks a constraint once for each index of a request, and only where a token can stand.

    constraint: called with the tokens before a position; the mask int32 [words] of the tokens that may stand there, or
        None where the text is complete. It may hand out the same tensor every time. stop_tokens: nothing follows them.
    A constraint that fails, or returns something else, fails its request alone.
    """

    def __init__(self, constraint: Constraint, stop_tokens: frozenset[int]) -> None:
        self._constraint = constraint
        self._stop_tokens = stop_tokens
        self._masks: dict[int, Tensor | None] = {}
        self._like: Tensor | None = None

    def at(self, index: int, request: Request) -> Tensor | None:
        """The mask at an index from the settled tokens on; None where nothing follows the draft before it.

        That is an end, or a draft that the constraint excludes or that is not asked about for the same reason.
        """
        if index not in self._masks:
            node = index - request.num_settled - 1
            reachable = node < 0 or self._goes_on(node, request)
            text = request.text_before(index)
            with request.failing_alone():
                self._masks[index] = self._ask(text) if reachable else None
        return self._masks[index]

    def allows(self, node: int, request: Request) -> bool:
        """Whether a draft may stand after its parent."""
        first = request.num_settled
        token, mask = request.sequence[first + node], self.at(first + 1 + request.drafts.parents[node], request)
        return mask is not None and token < BITS * len(mask) and bool(int(mask[token // BITS]) >> token % BITS & 1)

    @property
    def all_tokens(self) -> Tensor:
        """A mask that excludes nothing, once there has been another one."""
        assert self._like is not None
        return torch.full_like(self._like, -1)

    def keep(self, index: int) -> None:
        """Forget the masks at all indices but one: the tokens after it are other ones now."""
        self._masks = {position: mask for position, mask in self._masks.items() if position == index}

    def select(self, first: int, kept: Sequence[int]) -> None:
        """Forget those after all drafts but these, which get the numbers that they have in this list."""
        indices = {first: first} | {first + 1 + node: first + 1 + number for number, node in enumerate(kept)}
        self._masks = {indices[index]: mask for index, mask in self._masks.items() if index in indices}

    def _goes_on(self, node: int, request: Request) -> bool:
        """Whether a token may stand after a draft."""
        ends = request.sequence[request.num_settled + node] in self._stop_tokens
        return not ends and self.allows(node, request)

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
