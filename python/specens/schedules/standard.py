"""No speculation: every member forwards every token."""

from __future__ import annotations

from torch import Tensor

from specens.request import Request
from specens.schedules.plan import Plan


class Standard:
    """The baseline, and the definition of the right answer: one token a round, drawn from the target distribution.

    Members that share weights are forwarded as one batch.
    """

    speculates = False

    def __init__(self, plan: Plan) -> None:
        self.num_members = plan.num_members

    def run_round(self, request: Request) -> None:
        """Score, draw, commit."""
        logits: dict[int, Tensor] = {}
        for member in request.members:
            rows = member.score(request.sequence, 1)
            logits.update({index: rows[place : place + 1, -1] for place, index in enumerate(member.indices)})
        request.statistics.end_phase("score")

        request.draw([logits[index] for index in range(self.num_members)], "standard")
        request.statistics.end_phase("verify")
