"""What a drafter proposes: a tree of draft tokens; a chain is one with a child a node."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

ROOT = -1  # the parent of nodes below the settled text


class Drafts:
    """The draft tokens under test after the settled ones, which stand after them in the sequence, parents first.

    parents: the node that each stands after, ROOT for the settled text. proposers: who proposed each. depths: how many
    drafts the path to each has, itself counted. siblings: how the children of a node were drawn, as of `verify_tree`,
    so far as they were; None where all were chosen. edges: the node that stands after one, ROOT too, for a token.
    """

    def __init__(self) -> None:
        self.parents: list[int] = []
        self.proposers: list[int] = []
        self.depths: list[int] = []
        self.edges: dict[tuple[int, int], int] = {}
        self.siblings: str | None = "with_replacement"
        self.is_chain = True

    def __len__(self) -> int:
        return len(self.parents)

    def add(self, parent: int | None, token: int, proposer: int) -> None:
        """One more node, after an earlier one, or after the last."""
        node = len(self.parents)
        parent = node - 1 if parent is None else parent
        self.edges.setdefault((parent, token), node)
        self.is_chain = self.is_chain and parent == node - 1
        self.depths.append(1 + (self.depths[parent] if parent >= 0 else 0))
        self.parents.append(parent)
        self.proposers.append(proposer)

    def depth(self, node: int) -> int:
        """How many drafts the path to a node has; 0 of the root."""
        return self.depths[node] if node >= 0 else 0

    def path(self, node: int) -> list[int]:
        """The nodes from the first below the text to this one; of the root none."""
        if self.is_chain:
            return list(range(node + 1))
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def paths(self) -> list[list[int]]:
        """The path to each leaf."""
        inner = set(self.parents)
        return [self.path(node) for node in range(len(self)) if node not in inner]

    def children(self, node: int) -> list[int]:
        """The nodes after one, in the order of their test."""
        return [child for child, parent in enumerate(self.parents) if parent == node]

    @property
    def num_tested_rows(self) -> int:
        """Up to the last row that a node is tested at: that after the text, and those after nodes with children."""
        return 2 + max(self.parents)

    def only(self, kept: Sequence[int], tokens: Sequence[int]) -> Drafts:
        """Of the nodes with these tokens the kept ones alone, which ascend and include every parent of theirs."""
        numbers = {ROOT: ROOT} | {node: number for number, node in enumerate(kept)}
        left = Drafts()
        left.siblings = self.siblings
        for node in kept:
            left.add(numbers[self.parents[node]], tokens[node], self.proposers[node])
        return left

    def tail(self, tokens: Sequence[int]) -> Drafts:
        """The last nodes of a chain, which have these tokens, after a text that has grown by the others."""
        left = Drafts()
        for token, proposer in zip(tokens, self.proposers[len(self) - len(tokens) :], strict=True):
            left.add(len(left) - 1, token, proposer)
        return left


def below(parents: Sequence[int], dropped: Iterable[int]) -> set[int]:
    """Some nodes and all that stand after them."""
    gone = set(dropped)
    for node, parent in enumerate(parents):
        if parent in gone:
            gone.add(node)
    return gone
