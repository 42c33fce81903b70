"""What a user may set about a schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from specens.decoding.draft_lens import DraftLen
from specens.drafters import Drafter
from specens_kernels import DecisionTree, Replacement, Threshold, Typical

Rule = str | Typical | Threshold | Replacement | DecisionTree

CHILDREN = ("top", "sampled", "independent")
TREE_RULES = ("token", "traversal")


@dataclass(frozen=True)
class TreePlan:
    """The draft trees of the schedule `tree`.

    branches: the children of every node, level by level: (4, 2, 2) is a tree of 4 + 8 + 16 nodes.
    nodes: None, or the nodes of a tree that is grown instead: in each of at most `levels` levels the `width` nodes of
        largest path probability get `width` children, and in the end the most probable nodes are kept.
    children: "top", the drafter's most likely tokens; "sampled", drawn from its distribution without replacement; or
        "independent", drawn with it, so that a token may come twice. At temperature 0 and in grown trees always "top";
        elsewhere under the plan's rule "gumbel" always the tokens of the drafter's best Gumbel scores.
    rule: of `specens_kernels.verify_tree`, "token" or "traversal"; the plan's rule "gumbel" stands above it.
    Raises ValueError where one is out of range.
    """

    branches: tuple[int, ...] = (4, 2, 2)
    nodes: int | None = None
    width: int = 4
    levels: int = 4
    children: str = "top"
    rule: str = "token"

    def __post_init__(self) -> None:
        if not self.branches or not all(_is_positive(count) for count in self.branches):
            raise ValueError(f"tree: expected a number of children >= 1 for each level, got {self.branches}")
        for name in ("nodes", "width", "levels"):
            value = getattr(self, name)
            if not _is_positive(value) and not (name == "nodes" and value is None):
                raise ValueError(f"tree: expected {name} to be an integer >= 1, got {value!r}")
        if self.children not in CHILDREN or (self.nodes is not None and self.children != "top"):
            expected = "'top' in a grown tree" if self.nodes is not None else " or ".join(map(repr, CHILDREN))
            raise ValueError(f"tree: expected children {expected}, got {self.children!r}")
        if self.rule not in TREE_RULES:
            raise ValueError(f"tree: expected rule {' or '.join(map(repr, TREE_RULES))}, got {self.rule!r}")

    @property
    def most_nodes(self) -> int:
        """The most nodes that a member reads in a round."""
        if self.nodes is not None:
            return self.nodes + self.width * self.levels
        return sum(math.prod(self.branches[: level + 1]) for level in range(len(self.branches)))

    def __str__(self) -> str:
        shape = ",".join(map(str, self.branches)) if self.nodes is None else f"{self.nodes} nodes"
        return shape if self.children == "top" else f"{shape} {self.children}"


@dataclass(frozen=True)
class Plan:
    """Settings that every schedule is made from; each uses those that concern it.

    draft_lens: how many tokens each member drafts in a row. drafter: the member that drafts under `fixed` and `tree`;
    under `fixed` it may be none, and all draft_lens, which are equal, are its own.
    drafter_counts: whether the drafter's distribution is a part of the target. rule: how chains are accepted, a rule of
    `specens_kernels.verify_chain`; "gumbel" is one of every schedule, `standard` and `tree` too. proposes_first: under
    `alternate`, who proposes after a rejection; None leaves it to the schedule.
    """

    num_members: int
    draft_lens: tuple[DraftLen, ...]
    drafter: int | Drafter
    tree: TreePlan = field(default_factory=TreePlan)
    drafter_counts: bool = True
    rule: Rule = "token"
    proposes_first: int | None = None

    @property
    def replaces(self) -> bool:
        """Whether the rule lets an assistant replace the drafter's tokens: then nothing is drawn from a target."""
        return isinstance(self.rule, Replacement | DecisionTree)


def member_that_drafts(plan: Plan, schedule: str) -> int:
    """The index of the drafter. Raises ValueError where it is no member."""
    if not isinstance(plan.drafter, int):
        kind = type(plan.drafter).__name__
        raise ValueError(f"drafter: expected the index of a member under schedule '{schedule}', got a {kind}")
    return plan.drafter


def _is_positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
