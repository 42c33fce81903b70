"""The shape of draft trees: one of the five axes, beside who drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from specens_kernels import TokenTree

MOST_NODES = 16384  # of a TokenTree
CHILDREN = ("top", "sampled", "independent")
ORDERS = ("level", "best")


@dataclass(frozen=True)
class TreePlan:
    """Draft trees: of one shape, or grown by what the drafter finds probable.

    branches: the children of every node, level by level: (4, 2, 2) is a tree of 4 + 8 + 16 nodes.
    shape: in its place a TokenTree, such as `TokenTree.best_for_acceptance` of measured acceptance (Sequoia); the child
        rank of a node says which of the most likely tokens it gets, and of drawn ones how many there are.
    nodes: None, or the nodes of a tree that is grown instead, in at most `levels` levels. Where children are "top", the
        `width` most probable nodes get `width` children at a time, and in the end the most probable nodes are kept;
        where they are "sampled", children are drawn as long as the probability that one is come to, by the drafter's
        own distribution, is at least `threshold` (DySpec).
    order: of a grown tree, "level" expands nodes of the newest level (EAGLE-2; OPT-Tree with width = nodes), "best"
        those that are most probable wherever they are, and ends when nothing outside can be more probable than what is
        in the tree (SpecExec). gain: growth ends too when a step adds less to the expected length (OPT-Tree).
    children: "top", the drafter's most likely tokens; "sampled", drawn from its distribution without replacement; or
        "independent", drawn with it, so that a token may come twice. At temperature 0 always "top"; elsewhere under the
        rule "gumbel" in trees of one shape always the tokens of the drafter's best Gumbel scores. Drafters without
        distributions, such as a PromptLookup, fill the shape with their likeliest candidates.
    Raises ValueError where one is out of range.
    """

    branches: tuple[int, ...] = (4, 2, 2)
    nodes: int | None = None
    width: int = 4
    levels: int = 4
    children: str = "top"
    shape: TokenTree | None = field(default=None, compare=False)
    order: str = "level"
    gain: float = 0.0
    threshold: float = 0.02

    def __post_init__(self) -> None:
        listed = isinstance(self.branches, Sequence) and not isinstance(self.branches, str | bytes)
        if not listed or not self.branches or not all(_fits(count) for count in self.branches):
            expected = f"a number of children from 1 to {MOST_NODES} for each level"
            raise ValueError(f"tree: expected {expected}, got {self.branches!r}")
        for name in ("nodes", "width", "levels"):
            value = getattr(self, name)
            if not _fits(value) and not (name == "nodes" and value is None):
                raise ValueError(f"tree: expected {name} to be an integer from 1 to {MOST_NODES}, got {value!r}")
        if self.shape is not None and (not isinstance(self.shape, TokenTree) or not len(self.shape)):
            raise ValueError(f"tree: expected shape to be a TokenTree with nodes, got {self.shape!r}")
        if self.shape is not None and self.nodes is not None:
            raise ValueError("tree: expected either a shape or nodes, got both")
        if self.children not in CHILDREN or (self.nodes is not None and self.children == "independent"):
            expected = "'top' or 'sampled' in a grown tree" if self.nodes else " or ".join(map(repr, CHILDREN))
            raise ValueError(f"tree: expected children {expected}, got {self.children!r}")
        if self.order not in ORDERS:
            raise ValueError(f"tree: expected order {' or '.join(map(repr, ORDERS))}, got {self.order!r}")
        numbers = all(isinstance(value, int | float) for value in (self.threshold, self.gain))
        if not numbers or not 0 < self.threshold < 1 or not self.gain >= 0:
            got = f"{self.threshold!r} and {self.gain!r}"
            raise ValueError(f"tree: expected a threshold in (0, 1) and a gain >= 0, got {got}")
        if self.nodes is None:
            try:
                _ = self.tree
            except ValueError as error:  # too many nodes
                raise ValueError(str(error).replace("branches:", "tree:")) from None

    @property
    def is_grown(self) -> bool:
        """Whether the drafter's probabilities make the tree's shape."""
        return self.nodes is not None

    @cached_property
    def tree(self) -> TokenTree:
        """The shape of a tree that is not grown."""
        return TokenTree.branching(self.branches) if self.shape is None else self.shape

    @cached_property
    def ranks(self) -> list[int]:
        """Of each node of the shape, which of its parent's children it is."""
        return self.tree.child_ranks.tolist()

    @cached_property
    def families(self) -> dict[int, list[int]]:
        """The children of each node of the shape, in the order of their ranks."""
        own: dict[int, list[int]] = {}
        for node, parent in enumerate(self.tree.parents.tolist()):
            own.setdefault(parent, []).append(node)
        return {parent: sorted(nodes, key=self.ranks.__getitem__) for parent, nodes in own.items()}

    @property
    def most_levels(self) -> int:
        """The drafts of the longest path."""
        return self.levels if self.is_grown else self.tree.num_levels

    @property
    def most_paths(self) -> int:
        """How many leaves there may be."""
        return self.nodes or self.tree.num_leaves

    @property
    def most_nodes(self) -> int:
        """The most nodes that a member reads in a round."""
        if self.nodes is None:
            return len(self.tree)
        if self.children == "sampled":
            return self.nodes
        steps = self.nodes if self.order == "best" else self.levels
        return self.nodes + self.width * steps

    @property
    def most_children(self) -> int:
        """Of one node."""
        return self.width if self.is_grown else max(map(len, self.families.values()))

    def __str__(self) -> str:
        if self.nodes is not None:
            shape = f"{self.nodes} nodes"
        else:
            shape = ",".join(map(str, self.branches)) if self.shape is None else f"shape of {len(self.shape)} nodes"
        return shape if self.children == "top" else f"{shape} {self.children}"


def as_tree_plan(tree: Any) -> TreePlan | None:
    """A TreePlan from what a user may give for one, or None. Raises ValueError where it is something else."""
    if isinstance(tree, TokenTree):
        return TreePlan(shape=tree)
    if isinstance(tree, Sequence) and not isinstance(tree, str | bytes):
        return TreePlan(branches=tuple(tree))
    if tree is not None and not isinstance(tree, TreePlan):
        raise ValueError(
            f"tree: expected the number of children on each level, a TokenTree or a TreePlan, got {tree!r}"
        )
    return tree


def _fits(count: object) -> bool:
    return isinstance(count, int) and not isinstance(count, bool) and 1 <= count <= MOST_NODES
