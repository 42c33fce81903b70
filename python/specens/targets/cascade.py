"""Speculative cascades: a small model answers where it may, a large one elsewhere [Narasimhan et al., ICLR 2025]."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

Rule = Callable[[Tensor, Tensor, float], Tensor]  # small, large, alpha -> where the large model answers


@dataclass(frozen=True)
class Cascade:
    """Member 0 is the small model, member 1 the large one; a rule says where the large one's distribution is taken.

    rule, by the paper's names, with max the largest probability of a distribution:
        "chow": where max(small) < 1 - alpha.
        "diff": where max(small) < max(large) - alpha.
        "opt": where max(small) < max(large) - alpha * (the total variation distance of the two): the least loss.
        "token": token by token (TokenV3): the small model's token is kept where its probability under the large one is
            at least (1 - alpha) * max(large); the mass of the others goes to the large model's distribution.
    alpha: the cost of asking the large model (chow, diff, opt), or how much less likely a kept token may be (token).
    The rules for a whole position emit what a cascade would that decides before each token which model it asks; under
    a schedule that drafts with member 0, the large model is asked once for a whole chain.
    Source: Narasimhan et al., Faster Cascades via Speculative Decoding, ICLR 2025, sections 4 and 5.
    """

    rule: str = "opt"
    alpha: float = 0.1
    num_members: ClassVar[int] = 2

    def __post_init__(self) -> None:
        if self.rule not in (*ROW_RULES, "token"):
            raise ValueError(f"rule: expected one of {', '.join((*ROW_RULES, 'token'))}; got {self.rule!r}")
        if isinstance(self.alpha, bool) or not isinstance(self.alpha, int | float) or not math.isfinite(self.alpha):
            raise ValueError(f"alpha: expected a finite number, got {self.alpha!r}")

    def combine(self, member_logits: Sequence[Tensor], temperatures: Tensor) -> Tensor:
        """Log target distribution [rows, vocab] from logits [rows, vocab] of the small and the large model."""
        vocab = max(logits.shape[-1] for logits in member_logits)
        small, large = (
            torch.nn.functional.pad((logits / temperatures[:, None]).softmax(-1), (0, vocab - logits.shape[-1]))
            for logits in member_logits
        )
        if self.rule == "token":
            kept = large >= (1 - self.alpha) * large.amax(-1, keepdim=True)
            mixed = small * kept + large * (small * ~kept).sum(-1, keepdim=True)
        else:
            defers = ROW_RULES[self.rule](small, large, self.alpha)
            mixed = torch.where(defers[:, None], large, small)
        return mixed.log()


def _chow(small: Tensor, large: Tensor, alpha: float) -> Tensor:  # noqa: ARG001
    return small.amax(-1) < 1 - alpha


def _diff(small: Tensor, large: Tensor, alpha: float) -> Tensor:
    return small.amax(-1) < large.amax(-1) - alpha


def _opt(small: Tensor, large: Tensor, alpha: float) -> Tensor:
    distance = (large - small).clamp(min=0).sum(-1)
    return small.amax(-1) < large.amax(-1) - alpha * distance


ROW_RULES: dict[str, Rule] = {"chow": _chow, "diff": _diff, "opt": _opt}
