"""How often one of a node's k children is accepted, by the rules gumbel and token: `python -m bench.gumbel_trees`.

Random logits of a target, and a drafter's with noise of three sizes. Under the rule gumbel children are the drafter's k
best scores with the target's own noise, under the rule token they are drawn without replacement.
"""

from __future__ import annotations

from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from specens_kernels import TokenTree, sample, verify_tree

REQUESTS, VOCAB, SPREAD = 20_000, 1000, 2.0
NOISES = (0.25, 0.5, 1.0)
CHILDREN = (1, 2, 4)


def acceptance(target: Tensor, drafter: Tensor, children: int, rule: str) -> float:
    """The share of requests of which a child is accepted; logits [requests, vocab]."""
    seeds, positions = torch.arange(len(target)), torch.full((len(target),), 100)
    own = seeds if rule == "gumbel" else seeds + len(target)  # drafts of the rule token share no number with its tests
    tokens = sample(drafter, seeds=own, positions=positions, method="gumbel", count=children).tokens
    arguments: dict[str, Any] = {"rule": rule, "seeds": seeds, "positions": positions}
    rows = (len(target), children + 1, VOCAB)
    if rule == "token":
        arguments |= {"draft_logits": drafter[:, None].expand(rows), "siblings": "without_replacement"}
    verdict = verify_tree(target[:, None].expand(rows), tokens, TokenTree([-1] * children), **arguments)
    return float(verdict.num_accepted.double().mean())


def main() -> None:
    """Print a table."""
    generator = torch.Generator().manual_seed(1)
    target = torch.randn(REQUESTS, VOCAB, generator=generator) * SPREAD
    difference = torch.randn(target.shape, generator=generator)
    table = Table("drafter's noise", *(f"{rule}, {count}" for count in CHILDREN for rule in ("gumbel", "token")))
    for noise in NOISES:
        drafter = target + noise * difference
        shares = [acceptance(target, drafter, count, rule) for count in CHILDREN for rule in ("gumbel", "token")]
        table.add_row(str(noise), *(f"{share:.3f}" for share in shares))
    Console().print(table)


if __name__ == "__main__":
    main()
