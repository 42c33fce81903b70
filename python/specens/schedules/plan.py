"""What a user may set about a schedule."""

from __future__ import annotations

from dataclasses import dataclass

from specens.decoding.draft_lens import DraftLen
from specens.decoding.request import OUTSIDE
from specens.drafters import Drafter, MemberDrafter, TreePlan
from specens_kernels import DecisionTree, Replacement, Threshold, Typical

Rule = str | Typical | Threshold | Replacement | DecisionTree


@dataclass(frozen=True)
class Plan:
    """Settings that every schedule is made from; each uses those that concern it.

    draft_lens: how many tokens each member drafts in a row. drafter: the member that drafts under `fixed` and
    `parallel`, or a drafter that is none: then all draft_lens, which are equal, are its own. tree: the trees that it,
    and under `alternate` every member, drafts in place of chains. drafter_counts: whether the drafter's distribution is
    a part of the target. rule: how drafts are accepted, a rule of `specens_kernels.verify_chain` or, of trees,
    `verify_tree`; "gumbel" is one of every schedule, `standard` too. proposes_first: under `alternate`, who proposes
    after a rejection; None leaves it to the schedule.
    """

    num_members: int
    draft_lens: tuple[DraftLen, ...]
    drafter: int | Drafter
    tree: TreePlan | None = None
    drafter_counts: bool = True
    rule: Rule = "token"
    proposes_first: int | None = None

    def __post_init__(self) -> None:
        if self.tree is not None and not all(isinstance(length, int) for length in self.draft_lens):
            raise ValueError("draft_lens: expected numbers beside trees, which are their own lengths")

    @property
    def most_nodes(self) -> int:
        """The most nodes of draft trees that a member reads in a round."""
        own = self.drafter
        trees, extra = (1, 0) if isinstance(own, int) else (own.num_trees, own.extra_nodes)
        return 0 if self.tree is None else trees * self.tree.most_nodes + extra

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


def one_drafter(plan: Plan, schedule: str) -> tuple[int, Drafter]:
    """Who drafts for all members, and its index, OUTSIDE of one that is none."""
    if not isinstance(plan.drafter, int):
        return OUTSIDE, plan.drafter
    if plan.num_members < 2:
        raise ValueError(
            f"schedule: expected two members or more for '{schedule}', got {plan.num_members}; a lone one needs a "
            "drafter that is no member"
        )
    return plan.drafter, MemberDrafter(plan.drafter)
