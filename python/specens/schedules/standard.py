"""No speculation: every member forwards every token."""

from __future__ import annotations

from specens.decoding.batch import Batch
from specens.decoding.draws import draw
from specens.decoding.scorer import score_all
from specens.schedules.plan import Plan


class Standard:
    """The baseline, and the definition of the right answer: one token a round, drawn from the target distribution.

    Members that share weights are forwarded as one batch, and those of weight 0 not at all.
    """

    speculates = False

    def __init__(self, plan: Plan) -> None:
        pass

    def run_round(self, batch: Batch) -> None:
        """Score, draw, commit."""
        score_all([(own, [request for request in batch.requests if own.counts_for(request)]) for own in batch.scorers])
        batch.end_phase("score", batch.requests)

        draw(batch.requests, "standard")
        batch.end_phase("verify", batch.requests)
