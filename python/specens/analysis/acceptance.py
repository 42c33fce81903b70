"""How often the child of each rank is the accepted one: what the best shape of a draft tree follows from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from specens.decoding.trace import Round


def acceptance_by_rank(rounds: Iterable[Round]) -> list[float]:
    """Of the places on accepted paths that have a child of a rank, at how many it was the accepted one, rank by rank.

    rounds: of a text with draft trees, as `on_round` gets them, best of wide ones: `tree=(8,)`. What comes out is the
    `acceptance` of `TokenTree.best_for_acceptance`, which plans the tree of most accepted tokens (Chen et al., Sequoia,
    NeurIPS 2024, section 4.1).
    Raises ValueError where no drafts were tested.
    """
    came, accepted = [0], [0]
    for own in rounds:
        index: int | None = -1
        while index is not None:
            children = [number for number, draft in enumerate(own.drafts) if _parent(own.drafts, number) == index]
            index = None
            for rank, child in enumerate(children):
                if rank == len(came):
                    came.append(0)
                    accepted.append(0)
                came[rank] += 1
                if own.drafts[child]["accepted"]:
                    accepted[rank] += 1
                    index = child
    if not came[0]:
        raise ValueError("rounds: expected some in which drafts were tested, got none")
    rates = [count / total for count, total in zip(accepted, came, strict=True)]
    return [rate / max(sum(rates), 1.0) for rate in rates]  # of places with different numbers of children


def _parent(drafts: Sequence[dict], number: int) -> int:
    """The parent of a draft; in a chain the one before."""
    parent = drafts[number]["parent"]
    return number - 1 if parent is None else parent
