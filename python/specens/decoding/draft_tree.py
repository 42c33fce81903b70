"""A draft tree as it goes from the drafter to the test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specens_kernels import TokenTree

NO_NODE = -2  # among the parents that `verify_tree` reads


@dataclass(frozen=True)
class DraftTree:
    """What the drafter proposes in a round.

    tokens: of the nodes; -1 where the drafter's distribution had no token left for a sibling. siblings: how they were
        drawn from it, as `verify_tree` is told; None where they were chosen.
    logits: the drafter's own, [1, nodes + 1, vocab]; row 0 behind the settled text, row i + 1 behind node i, all 0
        where it did not read the node.
    slots: the place of each node among those that the drafter read; past the last one for those that it did not.
    """

    tree: TokenTree
    tokens: list[int]
    siblings: str | None
    logits: Tensor
    slots: list[int]

    @property
    def readable(self) -> list[int]:
        """The tokens with an id for every node, to be read by models."""
        return [max(token, 0) for token in self.tokens]

    def test_arguments(self, drafter: int, device: torch.device) -> dict[str, Any]:
        """What `verify_tree` has to know about the drafts; drafter: the member that made them."""
        edges = zip(self.tree.parents.tolist(), self.tokens, strict=True)
        parents = [parent if token >= 0 else NO_NODE for parent, token in edges]
        return {
            "draft_tokens": torch.tensor([self.tokens], device=device),
            "parents": torch.tensor([parents], device=device),
            "drafter": None if self.siblings is None else drafter,
            "siblings": self.siblings,
            "max_levels": self.tree.num_levels,
        }
