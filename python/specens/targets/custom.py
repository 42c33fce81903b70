"""A target that the caller computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Custom:
    """The target is the softmax of what a function makes of the members' logits, then filtered as sampling says.

    function: called with the members' logits, one float32 tensor [rows, vocab] each, and the temperatures [rows]; it
        returns logits [rows, vocab] that temperature acts on no more. Vocabularies may differ between members. Rows are
        independent of each other. At temperature 0 it is called with 1, and the largest logit is taken.
    num_members: how many members it is for; None takes any number.
    """

    function: Callable[[Sequence[Tensor], Tensor], Tensor]
    num_members: int | None = None

    def combine(self, member_logits: Sequence[Tensor], temperatures: Tensor) -> Tensor:
        """Logits [rows, vocab] of the target. Raises ValueError where the function returns something else."""
        logits = self.function(member_logits, temperatures)
        rows = member_logits[0].shape[0]
        if not isinstance(logits, Tensor) or not logits.is_floating_point() or logits.shape[:-1] != (rows,):
            got = f"{logits.dtype} {list(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
            raise ValueError(f"ensemble: expected the function to return logits [{rows}, vocab], got {got}")
        return logits
