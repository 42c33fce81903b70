"""How often one of k children is accepted that were drawn with replacement, by the rules token and k_seq, exactly.

`python -m bench.k_seq`: the rows of `bench.gumbel_trees`. Nothing is drawn: both numbers follow from the distributions.
"""

from __future__ import annotations

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench.gumbel_trees import NOISES, SPREAD, VOCAB
from specens_kernels.ops.verify_tree.rules import sequential_ratio

ROWS = 400
CHILDREN = (2, 4, 8)


def by_token(target: Tensor, draft: Tensor, children: int) -> float:
    """The mean over rows of distributions [rows, vocab]: each child is tested against what those before it left."""
    rejected = torch.ones(len(target), dtype=target.dtype)
    for _ in range(children):
        rejected = rejected * (1 - torch.minimum(target, draft).sum(-1))
        target = (target - draft).clamp(min=0)
        target = target / target.sum(-1, keepdim=True)
    return float((1 - rejected).mean())


def by_k_seq(target: Tensor, draft: Tensor, children: int) -> float:
    """Likewise: all are tested against the target, over a ratio."""
    ratio = sequential_ratio(target, draft, torch.full((len(target),), children))
    overlap = torch.minimum(draft, target / ratio[:, None]).sum(-1)
    return float((1 - (1 - overlap) ** children).mean())


def main() -> None:
    """Print a table."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(ROWS, VOCAB, generator=generator, dtype=torch.float64) * SPREAD
    difference = torch.randn(logits.shape, generator=generator, dtype=torch.float64)
    table = Table("drafter's noise", *(f"{rule}, {count}" for count in CHILDREN for rule in ("token", "k_seq")))
    for noise in NOISES:
        target, draft = logits.softmax(-1), (logits + noise * difference).softmax(-1)
        shares = [own(target, draft, count) for count in CHILDREN for own in (by_token, by_k_seq)]
        table.add_row(str(noise), *(f"{share:.4f}" for share in shares))
    Console().print(table)


if __name__ == "__main__":
    main()
