"""One member drafts a tree, all score it, the ensemble accepts a path [Miao et al., SpecInfer, ASPLOS 2024]."""

from __future__ import annotations

from specens.decoding.batch import Batch
from specens.decoding.request import Request
from specens.decoding.verification import verify_draft_tree
from specens.schedules.plan import Plan, member_that_drafts
from specens.schedules.propose_tree import propose_tree


class Tree:
    """Member `drafter` drafts a tree in every round; behind the accepted path always comes one more token.

    The drafter reads its tree level by level, and the last level only where its distribution is a part of the target:
    with weight 0 it is an outside drafter, and the ensemble is the others.
    """

    speculates = True

    def __init__(self, plan: Plan) -> None:
        if plan.num_members < 2:
            raise ValueError(f"schedule: expected two members or more for 'tree', got {plan.num_members}")
        self.drafter = member_that_drafts(plan, "tree")
        if not all(isinstance(length, int) for length in plan.draft_lens):
            raise ValueError("draft_lens: expected numbers under schedule 'tree', whose trees are its lengths")
        self.plan = plan.tree
        self.reads_leaves = plan.drafter_counts

    def run_round(self, batch: Batch) -> None:
        """Propose, score, verify, commit, for one request after another."""
        for request in list(batch.requests):
            self._run_round(batch, request)

    def _run_round(self, batch: Batch, request: Request) -> None:
        members = [request.lanes[scorer.index] for scorer in batch.scorers]
        draft = propose_tree(request, members[self.drafter], self.drafter, self.plan, self.reads_leaves)
        batch.end_phase("propose", [request])

        parents = draft.tree.parents.tolist()
        logits = [
            draft.logits if index == self.drafter else member.score_nodes(request.sequence, draft.readable, parents)
            for index, member in enumerate(members)
        ]
        batch.end_phase("score", [request])

        path = verify_draft_tree(request, logits, draft, self.drafter, self.plan.rule)
        for index, member in enumerate(members):
            member.keep_path([draft.slots[node] for node in path] if index == self.drafter else path)
        batch.end_phase("verify", [request])
